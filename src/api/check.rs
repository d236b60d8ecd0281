//! The rules of a WeightRefit that its types cannot say: bounds, unions, and values that exclude each other.
//! In a cluster the API server enforces the same ones from the resource's schema.

use crate::api::manifest::{Manifest, Metadata};
use crate::api::policy::{
    CommitMode, Encryption, IntOrString, Rolling, Serving, ServingType, Strategy, StrategyType, Transport,
};
use crate::api::problem::{FieldPath, Problem};
use crate::api::refit::{API_VERSION, Pool, Training, WeightRefitSpec};
use crate::api::source::{ConfigMapKey, Layout, LayoutType, Model, ModelType, PresetRef};
use crate::api::workload::{Ranks, RanksType, WorkloadRef};
use crate::limits;

/// A problem and the field that has it.
pub type Found = (FieldPath, Problem);

/// Checks `refit`.
///
/// # Errors
/// With the first field that breaks a rule, in the order of the resource.
pub fn check(refit: &Manifest) -> Result<(), Found> {
    if refit.api_version != API_VERSION {
        let problem =
            Problem::UnknownValue { value: refit.api_version.clone(), known: vec![API_VERSION.into()] };
        return Err((FieldPath::of("apiVersion"), problem));
    }
    let at = FieldPath::of("metadata");
    metadata(&at, &refit.metadata)?;
    // Pods name their refit by a label.
    length(&at.key("name"), "the name", "bytes", refit.metadata.name.len(), 1, limits::LABEL_MAX)?;
    spec(&FieldPath::of("spec"), &refit.spec)
}

/// Checks the name and namespace of an object.
///
/// # Errors
/// With the field that breaks a rule.
pub fn metadata(at: &FieldPath, metadata: &Metadata) -> Result<(), Found> {
    subdomain(&at.key("name"), &metadata.name)?;
    label(&at.key("namespace"), &metadata.namespace)
}

fn spec(at: &FieldPath, spec: &WeightRefitSpec) -> Result<(), Found> {
    model(&at.key("model"), &spec.model)?;
    training(&at.key("training"), &spec.training)?;
    let pools = &spec.inference.pools;
    let place = at.key("inference.pools");
    length(&place, "the list", "pools", pools.len(), 1, limits::POOLS_MAX)?;
    for (index, one) in pools.iter().enumerate() {
        pool(&place.index(index), one)?;
        if pools[..index].iter().any(|earlier| earlier.name == one.name) {
            return Err((place.index(index).key("name"), Problem::Duplicate(one.name.clone())));
        }
    }
    strategy(&at.key("commit.strategy"), &spec.commit.strategy)?;
    if spec.commit.mode == CommitMode::InPlace && spec.commit.strategy.kind != StrategyType::Rolling {
        let problem = Problem::Excluded {
            value: "InPlace",
            other_name: "strategy type",
            other: "AllAtOnce",
            hint: "Choose `strategy: {type: Rolling, …}`: in place, the trainer's death would poison every replica \
                   at once. Or choose `mode: Staged`.",
        };
        return Err((at.key("commit.mode"), problem));
    }
    bounded(&at.key("lag.maxSteps"), spec.lag.max_steps, 0, limits::LAG_STEPS_MAX)?;
    let transport = match spec.transfer.transport {
        Transport::Nccl => Some("Nccl"),
        Transport::NcclM2n => Some("NcclM2n"),
        Transport::Auto | Transport::Tcp => None,
    };
    if let (Some(value), Encryption::Required) = (transport, spec.transfer.encryption) {
        let problem = Problem::Excluded {
            value,
            other_name: "encryption",
            other: "Required",
            hint: "NCCL cannot encrypt: choose `encryption: TrustedFabric`, or `transport: Tcp`.",
        };
        return Err((at.key("transfer.transport"), problem));
    }
    timeouts(&at.key("timeouts"), spec)
}

fn model(at: &FieldPath, model: &Model) -> Result<(), Found> {
    let (kind, own) = match model.kind {
        ModelType::HuggingFaceConfig => ("HuggingFaceConfig", Some("huggingFaceConfig")),
        ModelType::TensorTable => ("TensorTable", Some("tensorTable")),
        ModelType::Registered => ("Registered", None),
    };
    let members = [
        ("huggingFaceConfig", model.hugging_face_config.is_some()),
        ("tensorTable", model.tensor_table.is_some()),
    ];
    union(at, kind, own, &members)?;
    for (member, source) in
        [("huggingFaceConfig", &model.hugging_face_config), ("tensorTable", &model.tensor_table)]
    {
        if let Some(source) = source {
            config_map_key(&at.key(member).key("configMapKeyRef"), &source.config_map_key_ref)?;
        }
    }
    Ok(())
}

fn training(at: &FieldPath, training: &Training) -> Result<(), Found> {
    bounded(&at.key("worldSize"), training.world_size, 1, limits::RANKS_MAX)?;
    ranks(&at.key("ranks"), &training.ranks)?;
    let per_pod = training.ranks.ranks_per_pod.unwrap_or(1);
    if training.world_size % per_pod != 0 {
        let (value, other) = (training.world_size.into(), per_pod.into());
        return Err((
            at.key("worldSize"),
            Problem::NoMultiple { value, other_name: "ranks.ranksPerPod", other },
        ));
    }
    workload(&at.key("workloadRef"), training.workload_ref.as_ref())?;
    layout(&at.key("layout"), &training.layout)?;
    bounded(
        &at.key("publish.maxHoldSeconds"),
        training.publish.max_hold_seconds,
        0,
        limits::TIMEOUT_SECONDS_MAX,
    )
}

fn pool(at: &FieldPath, pool: &Pool) -> Result<(), Found> {
    label(&at.key("name"), &pool.name)?;
    bounded(&at.key("ranksPerReplica"), pool.ranks_per_replica, 1, limits::RANKS_MAX)?;
    bounded(&at.key("minReplicas"), pool.min_replicas, 1, limits::REPLICAS_MAX)?;
    ranks(&at.key("ranks"), &pool.ranks)?;
    let (per_replica, per_pod) =
        (pool.ranks_per_replica, pool.ranks.ranks_per_pod.unwrap_or(pool.ranks_per_replica));
    if per_replica % per_pod != 0 && per_pod % per_replica != 0 {
        let (value, other) = (per_pod.into(), per_replica.into());
        let problem = Problem::Indivisible { value, other_name: "ranksPerReplica", other };
        return Err((at.key("ranks.ranksPerPod"), problem));
    }
    // A Deployment's pods are alike: nothing tells which part of a replica one of them would be.
    if pool.ranks.kind == RanksType::Deployment && per_pod < per_replica {
        let (value, other) = (per_pod.into(), per_replica.into());
        let problem = Problem::NoMultiple { value, other_name: "ranksPerReplica", other };
        return Err((at.key("ranks.ranksPerPod"), problem));
    }
    workload(&at.key("workloadRef"), pool.workload_ref.as_ref())?;
    layout(&at.key("layout"), &pool.layout)?;
    serving(&at.key("serving"), &pool.serving)
}

fn ranks(at: &FieldPath, ranks: &Ranks) -> Result<(), Found> {
    let kind = match ranks.kind {
        RanksType::JobSet => "JobSet",
        RanksType::LeaderWorkerSet => "LeaderWorkerSet",
        RanksType::StatefulSet => "StatefulSet",
        RanksType::IndexedJob => "IndexedJob",
        RanksType::Deployment => "Deployment",
        RanksType::RayCluster => "RayCluster",
        RanksType::PodCliqueSet => "PodCliqueSet",
        RanksType::Label => "Label",
        RanksType::Registered => "Registered",
    };
    let own = match ranks.kind {
        RanksType::JobSet => Some("jobSet"),
        RanksType::Label => Some("label"),
        _ => None,
    };
    union(at, kind, own, &[("jobSet", ranks.job_set.is_some()), ("label", ranks.label.is_some())])?;
    if let Some(per_pod) = ranks.ranks_per_pod {
        bounded(&at.key("ranksPerPod"), per_pod, 1, limits::RANKS_MAX)?;
    }
    if let Some(jobs) = &ranks.job_set {
        let (place, jobs) = (at.key("jobSet.replicatedJobs"), &jobs.replicated_jobs);
        length(&place, "the list", "names", jobs.len(), 1, limits::REPLICATED_JOBS_MAX)?;
        for (index, job) in jobs.iter().enumerate() {
            label(&place.index(index), job)?;
            if jobs[..index].contains(job) {
                return Err((place.index(index), Problem::Duplicate(job.clone())));
            }
        }
    }
    if let Some(keys) = &ranks.label {
        text(&at.key("label.rankKey"), &keys.rank_key, limits::LABEL_KEY_MAX)?;
        if let Some(key) = &keys.replica_key {
            text(&at.key("label.replicaKey"), key, limits::LABEL_KEY_MAX)?;
        }
    }
    Ok(())
}

fn workload(at: &FieldPath, workload: Option<&WorkloadRef>) -> Result<(), Found> {
    let Some(workload) = workload else { return Ok(()) };
    text(&at.key("apiVersion"), &workload.api_version, limits::OBJECT_NAME_MAX)?;
    text(&at.key("kind"), &workload.kind, limits::LABEL_MAX)?;
    if let Some(namespace) = &workload.namespace {
        label(&at.key("namespace"), namespace)?;
    }
    subdomain(&at.key("name"), &workload.name)
}

fn layout(at: &FieldPath, layout: &Layout) -> Result<(), Found> {
    let (kind, own) = match layout.kind {
        LayoutType::Preset => ("Preset", Some("preset")),
        LayoutType::Inline => ("Inline", Some("inline")),
        LayoutType::ConfigMap => ("ConfigMap", Some("configMap")),
        LayoutType::Registered => ("Registered", None),
    };
    let members = [
        ("preset", layout.preset.is_some()),
        ("inline", layout.inline.is_some()),
        ("configMap", layout.config_map.is_some()),
    ];
    union(at, kind, own, &members)?;
    if let Some(PresetRef { name, revision, sizes }) = &layout.preset {
        let at = at.key("preset");
        text(&at.key("name"), name, limits::KEY_MAX)?;
        bounded(&at.key("revision"), *revision, 1, limits::REVISION_MAX)?;
        length(&at.key("sizes"), "the mapping", "axes", sizes.len(), 0, limits::AXES_MAX)?;
        for (axis, size) in sizes {
            bounded(&at.key("sizes").entry(axis), *size, 1, limits::AXIS_SIZE_MAX)?;
        }
    }
    if let Some(inline) = &layout.inline {
        length(&at.key("inline"), "the mapping", "keys", inline.len(), 0, limits::INLINE_KEYS_MAX)?;
    }
    layout.config_map.as_ref().map_or(Ok(()), |key| config_map_key(&at.key("configMap"), key))
}

fn serving(at: &FieldPath, serving: &Serving) -> Result<(), Found> {
    let (kind, own) = match serving.kind {
        ServingType::Always => ("Always", None),
        ServingType::AfterFirstRefit => ("AfterFirstRefit", None),
        ServingType::WithinStaleness => ("WithinStaleness", Some("withinStaleness")),
    };
    union(at, kind, own, &[("withinStaleness", serving.within_staleness.is_some())])?;
    let Some(staleness) = serving.within_staleness else { return Ok(()) };
    let at = at.key("withinStaleness");
    if let Some(steps) = staleness.max_stale_steps {
        bounded(&at.key("maxStaleSteps"), steps, 0, limits::LAG_STEPS_MAX)?;
    }
    if let Some(seconds) = staleness.max_stale_seconds {
        bounded(&at.key("maxStaleSeconds"), seconds, 1, limits::TIMEOUT_SECONDS_MAX)?;
    }
    match (staleness.max_stale_steps, staleness.max_stale_seconds) {
        (None, None) => Err((at, Problem::Missing("maxStaleSteps".into()))),
        _ => Ok(()),
    }
}

fn strategy(at: &FieldPath, strategy: &Strategy) -> Result<(), Found> {
    let (kind, own) = match strategy.kind {
        StrategyType::AllAtOnce => ("AllAtOnce", None),
        StrategyType::Rolling => ("Rolling", Some("rolling")),
    };
    union(at, kind, own, &[("rolling", strategy.rolling.is_some())])?;
    let Some(Rolling { max_unavailable }) = &strategy.rolling else { return Ok(()) };
    let at = at.key("rolling.maxUnavailable");
    match max_unavailable {
        IntOrString::Int(number) => bounded(&at, *number, 1, limits::REPLICAS_MAX),
        IntOrString::String(text) => {
            match text.strip_suffix('%').filter(|digits| is_number(digits)).map(str::parse) {
                Some(Ok(percent)) => bounded(&at, percent, 1, 100),
                _ => Err(malformed(at, text, "a number or a percentage such as `25%`")),
            }
        }
    }
}

fn timeouts(at: &FieldPath, spec: &WeightRefitSpec) -> Result<(), Found> {
    let timeouts = &spec.timeouts;
    for (key, seconds) in [
        ("publishSeconds", timeouts.publish_seconds),
        ("prepareSeconds", timeouts.prepare_seconds),
        ("pauseSeconds", timeouts.pause_seconds),
        ("transferSeconds", timeouts.transfer_seconds),
        ("verifySeconds", timeouts.verify_seconds),
        ("commitSeconds", timeouts.commit_seconds),
        ("resumeSeconds", timeouts.resume_seconds),
        ("totalSeconds", timeouts.total_seconds),
    ] {
        bounded(&at.key(key), seconds, 1, limits::TIMEOUT_SECONDS_MAX)?;
    }
    Ok(())
}

fn config_map_key(at: &FieldPath, key: &ConfigMapKey) -> Result<(), Found> {
    subdomain(&at.key("name"), &key.name)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if key.key.is_empty() || key.key.len() > limits::KEY_MAX || !key.key.chars().all(fits) {
        return Err(malformed(at.key("key"), &key.key, "a ConfigMap key: letters, digits, `-`, `_` and `.`"));
    }
    Ok(())
}

/// At most one member, the one of the type; `own` is `None` where the type has no fields.
fn union(
    at: &FieldPath,
    kind: &str,
    own: Option<&'static str>,
    members: &[(&'static str, bool)],
) -> Result<(), Found> {
    for &(member, set) in members {
        let kind = kind.to_owned();
        match (own == Some(member), set) {
            (true, false) => return Err((at.clone(), Problem::MissingMember { kind, member })),
            (false, true) => return Err((at.key(member), Problem::ForeignMember { kind, member })),
            _ => {}
        }
    }
    Ok(())
}

fn bounded(at: &FieldPath, value: i32, least: i32, most: i32) -> Result<(), Found> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err((at.clone(), Problem::OutOfBounds { value: value.into(), least: least.into(), most: most.into() }))
}

fn length(
    at: &FieldPath,
    what: &'static str,
    unit: &'static str,
    count: usize,
    least: usize,
    most: usize,
) -> Result<(), Found> {
    if (least..=most).contains(&count) {
        return Ok(());
    }
    Err((at.clone(), Problem::Length { what, unit, count, least, most }))
}

fn text(at: &FieldPath, text: &str, most: usize) -> Result<(), Found> {
    length(at, "the text", "bytes", text.len(), 1, most)
}

fn label(at: &FieldPath, text: &str) -> Result<(), Found> {
    if is_label(text) {
        return Ok(());
    }
    Err(malformed(at.clone(), text, "a DNS label: at most 63 lower-case letters, digits and inner `-`"))
}

fn subdomain(at: &FieldPath, text: &str) -> Result<(), Found> {
    if text.len() <= limits::OBJECT_NAME_MAX && text.split('.').all(is_name) {
        return Ok(());
    }
    Err(malformed(at.clone(), text, "an object name: lower-case letters, digits, inner `-` and `.`"))
}

fn is_label(text: &str) -> bool {
    text.len() <= limits::LABEL_MAX && is_name(text)
}

/// One part of an object's name; Kubernetes bounds only their sum.
fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// A decimal number without sign or leading zero.
fn is_number(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0')
}

fn malformed(at: FieldPath, value: &str, expected: &'static str) -> Found {
    (at, Problem::Malformed { value: value.chars().take(80).collect(), expected })
}
