//! Every bound of this package, with its reason.

use std::time::Duration;

/// Ranks of the training world or of one inference replica: planning is measured to 4,096 × 2,048 ranks, and
/// one power of two above the largest leaves room without letting a typo allocate the machine away.
pub const RANKS_MAX: i32 = 8_192;

/// Replicas of one pool: status is proven to stay under 8 KB with this many.
pub const REPLICAS_MAX: i32 = 1_024;

/// Pools of one refit: each costs a layout and a digest per tensor; real fleets have two or three.
pub const POOLS_MAX: usize = 16;

/// Any single timeout and hold: a day. Longer is no timeout but a wedged fleet that nobody is told of.
pub const TIMEOUT_SECONDS_MAX: i32 = 86_400;

/// Steps that a replica may stay behind: far above any lag that still trains.
pub const LAG_STEPS_MAX: i32 = 1_000_000;

/// Bytes of a Kubernetes object name (DNS subdomain).
pub const OBJECT_NAME_MAX: usize = 253;

/// Bytes of a pool name and of a label value (DNS label).
pub const LABEL_MAX: usize = 63;

/// Bytes of a preset's name and of a ConfigMap key.
pub const KEY_MAX: usize = 253;

/// Bytes of a label's key: a DNS subdomain, `/`, and a name of 63.
pub const LABEL_KEY_MAX: usize = OBJECT_NAME_MAX + 1 + LABEL_MAX;

/// Replicated jobs of one JobSet that are ranks: real ones have a handful.
pub const REPLICATED_JOBS_MAX: usize = 63;

/// Revision of a preset: each is a change by hand, of which there are a few a year.
pub const REVISION_MAX: i32 = 1_000_000;

/// Axes that a preset's sizes name: the longest list known has nine.
pub const AXES_MAX: usize = 16;

/// Top-level keys of an inline layout: the format has eleven.
pub const INLINE_KEYS_MAX: usize = 32;

/// Size of one parallel axis in a preset: an axis is never larger than its side.
pub const AXIS_SIZE_MAX: i32 = RANKS_MAX;

/// Bytes of one file given with `-f`, `--document` or `--tensors`: a ConfigMap holds 1 MiB, so this is some
/// sixty of them; a larger file is not a manifest but a mistake (a weights file, most likely).
pub const INPUT_FILE_BYTES_MAX: u64 = 64 << 20;

/// Bytes that gzip data of a ConfigMap may expand to: a tensor table of a million tensors, and no zip bomb.
pub const INFLATED_BYTES_MAX: u64 = 256 << 20;

/// Status: replicas that are listed as behind; more are told by their number alone.
pub const BEHIND_MAX: usize = 10;

/// Status: agent versions that are listed: a rollout has two, a neglected fleet a few more.
pub const AGENT_VERSIONS_MAX: usize = 8;

/// Status: conditions, of which nine are known; room for those of other controllers.
pub const CONDITIONS_MAX: usize = 16;

/// Status: bytes of a message: a sentence each of what, where, since when, what follows and what to do.
pub const MESSAGE_MAX: usize = 512;

/// Status: bytes of a reason or a condition's type, both single words.
pub const REASON_MAX: usize = 63;

/// Status: bytes of a digest: `sha256:` and 64 hex digits.
pub const DIGEST_MAX: usize = 71;

/// Status: bytes of a pod as namespace/name.
pub const POD_MAX: usize = LABEL_MAX + 1 + OBJECT_NAME_MAX;

/// Status: bytes of a replica's name: its pod's, `/` and a number where a pod holds several.
pub const REPLICA_NAME_MAX: usize = OBJECT_NAME_MAX + 5;

/// Status: replicas of all pools.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
pub const ALL_REPLICAS_MAX: i32 = REPLICAS_MAX * POOLS_MAX as i32;

/// Status: epochs, rounds, runs, steps, bytes, milliseconds. They are u64 on the wire and int64 in Kubernetes, whose
/// bounds are float64: the largest power of two below it, which all three hold exactly.
pub const COUNTER_MAX: i64 = 1 << 62;

/// Status: versions of the round protocol and the planner, which grow by one with a change of theirs.
pub const INTERFACE_VERSION_MAX: i32 = 10_000;

/// Connections that shake hands at once: a thundering herd of agents after a restart waits in the backlog.
pub const HANDSHAKES_MAX: usize = 256;

/// One TLS handshake: an agent whose CPU is throttled needs a second; a silent socket must not hold a place.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause after a failed accept, which is nearly always a lack of descriptors.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// From an open stream to its first message.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections of one pod: its agent has one and dials another to renew its certificate; those whose end has not been
/// noticed yet, for at most 20 s, are a few more.
pub const CONNECTIONS_PER_POD_MAX: usize = 16;

/// Connections that show no certificate of ours, together: a fleet that enrols at once, and no more than a process has
/// descriptors for.
pub const STRANGERS_MAX: usize = 8_192;

/// How long such a connection lasts: an enrolment asks the API server three times.
pub const ENROL_TIMEOUT: Duration = Duration::from_secs(30);

/// Calls at once on one connection: an agent makes one.
pub const CALLS_PER_CONNECTION_MAX: u32 = 4;

/// Pods of one refit whose refusal is kept for the status, which tells of a few.
pub const REFUSED_PODS_MAX: usize = 64;

/// How long a refusal counts: an agent that is refused asks again every few seconds.
pub const REFUSED_FOR: Duration = Duration::from_secs(60);

/// Status: pods at fault that one message tells in full.
pub const FAULTS_SHOWN_MAX: usize = 2;

/// Pings on agents' connections: a node that vanished without a word is noticed within 20 s.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Silence after such a ping that ends the connection.
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Agents of one refit: the largest membership has this many ranks, each in a pod of its own.
pub const AGENTS_MAX: usize = 16_384;

/// Ranks of one pod: nodes have 8 or 16 accelerators; data parallel groups of one pod multiply that by a few.
pub const CLAIMS_MAX: usize = 1_024;

/// One message of an agent: the state of 1,024 ranks at some 300 bytes each, with room.
pub const AGENT_MESSAGE_BYTES_MAX: usize = 1 << 20;

/// What one rank has recorded, as JSON: 100 bytes a piece, and a rank of 160,000 experts' tensors has as many.
pub const RECORDING_BYTES_MAX: usize = 16 << 20;

/// Messages of all agents that wait for the hub; beyond it their streams wait.
pub const HUB_INPUTS_MAX: usize = 1_024;

/// Instructions that wait for one agent: there are three kinds, and a later Configure replaces an older one.
pub const INSTRUCTIONS_MAX: usize = 16;

/// From an epoch that could not be recorded to the next attempt: an API server that restarts is back after several.
pub const RECORD_RETRY_MS: u64 = 1_000;

/// Name under which the operator's writes stand in `metadata.managedFields`, and its events.
pub const FIELD_MANAGER: &str = "weightrefit-operator";

/// Version of the round protocol that memberships are made for.
pub const PROTOCOL_VERSION: i32 = 1;

/// Version of the planner that memberships are made for.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
pub const PLANNER_VERSION: i32 = weightrefit_core::plan::PLANNER_VERSION as i32;

/// Ready stays True for this long after it should be False: who waits for it rolls back when it turns False, and an
/// engine that restarts is back in this time.
pub const READY_DWELL: Duration = Duration::from_secs(30);

/// From the start of a coordinator until agents that it does not hear of count as lost: as long as it waits for them
/// before it makes another membership.
pub const SETTLE: Duration = Duration::from_millis(weightrefit_core::limits::RESTART_SETTLE_MS);

/// From a change of what a coordinator knows until it is looked at: while bytes move, each agent reports 4 times a
/// second, and people notice no tenth of it.
pub const VIEW_INTERVAL: Duration = Duration::from_millis(100);

/// Between two writes of a status for round results alone.
pub const STATUS_INTERVAL: Duration = Duration::from_secs(10);

/// Between two events of one refit and reason: what goes on and off is told by the status.
pub const EVENT_INTERVAL: Duration = Duration::from_secs(600);

/// From the news that a refit is deleted until its agents' streams end: a round in progress needs not be cut short.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// From one look at the authorities' dates to the next. What follows from these dates is never more urgent than a day.
pub const AUTHORITY_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// How long is believed what a workload asks for: people who scale one look again after some seconds, and 1,000 refits
/// that name two are 133 questions a second, each for one object.
pub const WORKLOAD_LIFETIME: Duration = Duration::from_secs(15);

/// From one look at the owner of the authority's Secret and the lease to the next: two questions. Without an owner they
/// would stay when the definition goes, and nothing else would be wrong.
pub const OWNERSHIP_INTERVAL: Duration = Duration::from_secs(30);

/// From one count of the namespaces that have the authorities' certificates to the next: of what is known here, so that
/// it costs nothing, and a successor is announced for a day.
pub const BUNDLES_INTERVAL: Duration = Duration::from_secs(10);

/// From a failed request to the API server to the next attempt.
pub const RECONCILE_RETRY: Duration = Duration::from_secs(5);

/// Refits that are validated at once: each may take a core for seconds.
pub const VALIDATIONS_MAX: usize = 2;

/// Answer of the API server to one question of ours, with every repetition that it asked for: it takes milliseconds;
/// who waited this long asks again.
pub const API_ANSWER_MAX: Duration = Duration::from_secs(8);

/// Least pause before a question that the API server did not want to answer yet, even if it says that none is needed.
pub const RETRY_PAUSE_MIN: Duration = Duration::from_secs(1);

/// Between two beginnings of one watch: it lasts [`WATCH_SECONDS`], so who sees it end at once sees a broken server.
pub const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// Seconds that a watch lasts before it begins again where it ended. kube gives up one that has said nothing for 5 s
/// more: so a connection that was lost without a word hides changes for a minute at most. Each beginning costs the API
/// server one request.
pub const WATCH_SECONDS: u32 = 55;

/// Token reviews in flight: a fleet that enrols at once is reviewed in a few seconds, a flood stays a trickle.
pub const TOKEN_REVIEWS_MAX: usize = 32;

/// Bytes of a question about one pod: the API server takes objects of 3 MiB, and the question holds one and its options.
pub const REVIEW_BYTES_MAX: usize = 8 << 20;

/// How long the webhook's certificate lasts: it is replaced at a third, so that days without a replacement are noticed
/// before they matter.
pub const WEBHOOK_CERTIFICATE_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Bytes of an enrolment token: a projected one has some 1,300.
pub const ENROLMENT_TOKEN_BYTES_MAX: usize = 16 << 10;

/// How long a granted consent is believed: what was taken back holds within a minute.
pub const CONSENT_LIFETIME: Duration = Duration::from_secs(60);

/// How long a refusal is believed: short, since somebody is about to grant it; agents ask again every 5 s.
pub const NO_CONSENT_LIFETIME: Duration = Duration::from_secs(2);

/// Consents remembered: one for each account and refit, of which a large cluster has hundreds.
pub const CONSENTS_MAX: usize = 4_096;

/// Local run: steps of one run; enough to watch it for hours, and a number that no typo reaches.
pub const LOCAL_ROUNDS_MAX: u32 = 100_000;

/// Local run: from the start, or a restart, until every agent is a member and every rank registered. Loading a large
/// weights file on a slow disk takes most of it.
pub const READY_LIMIT: Duration = Duration::from_secs(120);

/// Local run: beyond the resource's `totalSeconds`, for what happens before and after a round.
pub const STEP_MARGIN: Duration = Duration::from_secs(60);

/// Local run: from the last round until every engine has compared its tensors with the file.
pub const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// Local run: from a commit to the end of the replica's first forward step on it, which takes milliseconds unless the
/// machine is busy.
pub const FIRST_STEP_LIMIT: Duration = Duration::from_secs(20);

/// Local run: for processes to end by themselves, which takes milliseconds unless the machine is busy.
pub const END_LIMIT: Duration = Duration::from_secs(20);

/// Local run: how long a test keeps a process stopped: longer than the silence after which a peer counts as lost.
pub const STOP_MAX: Duration = Duration::from_secs(8);

/// Local run: processes that may be restarted; more is a loop.
pub const RESTARTS_MAX: u32 = 16;

const _: () = assert!(AXIS_SIZE_MAX <= RANKS_MAX && LABEL_MAX <= OBJECT_NAME_MAX);
