//! The API server, and what is installed in the cluster for all refits.

use super::finding::Finding;
use crate::api::documents::SourceText;
use crate::api::refit::WeightRefit;
use crate::cli::cluster::Connected;
use crate::controller::pod_facts::{REFIT_LABEL, SIDE_LABEL};
use crate::injection::{AGENT_CONTAINER, Settings};
use crate::operator::lease::LEASE;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, CustomResourceExt, ResourceExt};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use x509_parser::prelude::{FromDer, X509Certificate};

/// The oldest minor version of Kubernetes that the charts and the webhook's sidecars are made for.
const MINOR_MIN: u32 = 33;

/// A certificate that ends sooner than this is wrong already: whoever is told has a week.
const EXPIRY_SOON_S: i64 = 7 * 24 * 60 * 60;

/// A leader writes its lease every few seconds, and loses it after 15.
const LEASE_STALE_S: i64 = 30;

/// ConfigMap of the injection settings, and its key.
const SETTINGS: (&str, &str) = ("weightrefit-injection", "injection.yaml");

/// What was found.
pub(super) struct Found {
    pub(super) findings: Vec<Finding>,
    /// `None` where they cannot be read.
    pub(super) settings: Option<Settings>,
}

/// All checks. What was looked for and is not there is told once, so later checks may be missing.
pub(super) async fn look(cluster: &Connected, namespace: &str, configuration: &str) -> Found {
    let mut findings =
        vec![api_server(cluster).await, definition(cluster).await, operator(cluster, namespace).await];
    let (settings, finding) = settings(cluster, namespace).await;
    findings.push(finding);
    let (is_there, found) = webhook(cluster, configuration).await;
    findings.extend(found);
    if is_there {
        findings.push(asked(cluster, namespace, configuration).await);
    }
    Found { findings, settings }
}

async fn api_server(cluster: &Connected) -> Finding {
    const CHECK: &str = "API server";
    let version = match cluster.client.apiserver_version().await {
        Ok(version) => version,
        Err(error) => return Finding::unknown(CHECK, &error),
    };
    // Some providers write `33+`.
    let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
    match (version.major.as_str(), digits.parse::<u32>()) {
        ("1", Ok(minor)) if minor < MINOR_MIN => Finding::wrong(
            CHECK,
            format!("{} is older than 1.{MINOR_MIN}", version.git_version),
            "agents are sidecars with probes of their own, which older versions do not run as they must",
            format!("Upgrade the cluster to 1.{MINOR_MIN} or newer."),
        ),
        _ => Finding::good(CHECK, version.git_version),
    }
}

async fn definition(cluster: &Connected) -> Finding {
    const CHECK: &str = "definition";
    const APPLY: &str = "Run `weightrefit crd | kubectl apply --server-side -f -`.";
    let ours = WeightRefit::crd();
    let api = Api::<CustomResourceDefinition>::all(cluster.client.clone());
    let theirs = match api.get_opt(&ours.name_any()).await {
        Ok(Some(theirs)) => theirs,
        Ok(None) => {
            return Finding::wrong(
                CHECK,
                format!("{} does not exist", ours.name_any()),
                "nobody can apply a WeightRefit",
                APPLY,
            );
        }
        Err(error) => return Finding::unknown(CHECK, &error),
    };
    let is_established = theirs.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut is_established = is_established.filter(|condition| condition.type_ == "Established");
    if !is_established.any(|condition| condition.status == "True") {
        return Finding::wrong(
            CHECK,
            format!("{} is not established", ours.name_any()),
            "the API server does not serve it",
            "Read its conditions: `kubectl describe crd weightrefits.weightrefit.dev`.",
        );
    }
    let schema =
        |definition: &CustomResourceDefinition| {
            definition.spec.versions.iter().find(|version| version.served).map(|version| {
                (version.name.clone(), serde_json::to_value(&version.schema).unwrap_or_default())
            })
        };
    match (schema(&ours), schema(&theirs)) {
        (Some((name, ours)), Some((theirs_name, theirs))) if name == theirs_name && same(&ours, &theirs) => {
            Finding::good(CHECK, format!("{name}, as this binary has it"))
        }
        _ => Finding::wrong(
            CHECK,
            "the cluster has another one than this binary",
            "fields that it does not know are dropped without a word",
            format!("If this binary is not older than the operator: {}", APPLY.replace("Run", "run")),
        ),
    }
}

/// Whether two documents say the same: the API server drops empty values and writes whole floats as integers.
fn same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            let null = Value::Null;
            ours.keys()
                .chain(theirs.keys())
                .all(|key| same(ours.get(key).unwrap_or(&null), theirs.get(key).unwrap_or(&null)))
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| same(ours, theirs))
        }
        (Value::Number(ours), Value::Number(theirs)) => ours.as_f64() == theirs.as_f64(),
        (ours, theirs) => ours == theirs,
    }
}

async fn operator(cluster: &Connected, namespace: &str) -> Finding {
    const CHECK: &str = "operator";
    let api = Api::<Lease>::namespaced(cluster.client.clone(), namespace);
    let spec = match api.get_opt(LEASE).await {
        Ok(lease) => lease.and_then(|lease| lease.spec).unwrap_or_default(),
        Err(error) => return Finding::unknown(CHECK, &error),
    };
    let why = "rounds go on, but no refit begins, no membership changes and no status is written";
    let logs = format!(
        "Read `kubectl -n {namespace} get pods` and `kubectl -n {namespace} logs deployment/weightrefit-operator`."
    );
    let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
    match (holder, spec.renew_time) {
        (Some(holder), Some(renewed)) => {
            let age = Timestamp::now().duration_since(renewed.0).as_secs();
            match age <= LEASE_STALE_S {
                true => Finding::good(CHECK, format!("{holder} leads")),
                false => Finding::wrong(CHECK, format!("nobody leads: {holder} did, {age} s ago"), why, logs),
            }
        }
        _ => Finding::wrong(
            CHECK,
            format!("nobody leads in namespace {namespace}"),
            why,
            format!("{logs} If it is installed elsewhere, say where with --operator-namespace."),
        ),
    }
}

async fn settings(cluster: &Connected, namespace: &str) -> (Option<Settings>, Finding) {
    const CHECK: &str = "profiles";
    let (name, key) = SETTINGS;
    let shown = format!("{namespace}/{name}");
    let install =
        format!("Install or upgrade chart weightrefit in namespace {namespace}; it writes this ConfigMap.");
    let why = "pods cannot be given agents";
    let api = Api::<ConfigMap>::namespaced(cluster.client.clone(), namespace);
    let map = match api.get_opt(name).await {
        Ok(map) => map,
        Err(error) => return (None, Finding::unknown(CHECK, &error)),
    };
    let Some(text) = map.and_then(|map| map.data?.remove(key)) else {
        return (
            None,
            Finding::wrong(CHECK, format!("ConfigMap {shown} with {key} does not exist"), why, install),
        );
    };
    match Settings::parse(&SourceText { file: shown, text }) {
        Ok(settings) => {
            let names: Vec<&str> = settings.profiles.keys().map(String::as_str).collect();
            let said = format!("{}; agents are {}", names.join(", "), settings.image);
            (Some(settings), Finding::good(CHECK, said))
        }
        Err(refusal) => {
            let to_do = refusal.problem.hint(&refusal.path);
            (None, Finding::wrong(CHECK, refusal.to_string(), why, to_do))
        }
    }
}

/// Whether there is one, and what is found of it.
async fn webhook(cluster: &Connected, configuration: &str) -> (bool, Vec<Finding>) {
    const CHECK: &str = "webhook";
    let api = Api::<MutatingWebhookConfiguration>::all(cluster.client.clone());
    let found = match api.get_opt(configuration).await {
        Ok(Some(found)) => found,
        Ok(None) => {
            let finding = Finding::advice(
                CHECK,
                format!("MutatingWebhookConfiguration {configuration} does not exist"),
                "pods get no agent by themselves",
                "Use `weightrefit inject`, or set webhook.enabled of the chart; another name is said with --webhook-configuration.",
            );
            return (false, vec![finding]);
        }
        Err(error) => return (false, vec![Finding::unknown(CHECK, &error)]),
    };
    let bundles = found.webhooks.iter().flatten().map(|webhook| webhook.client_config.ca_bundle.as_ref());
    let findings = bundles.map(|bundle| {
        let pem = bundle.map(|bundle| bundle.0.as_slice()).unwrap_or_default();
        certificates(pem, Timestamp::now().as_second())
    });
    (true, findings.collect())
}

/// What the API server trusts.
fn certificates(pem: &[u8], now: i64) -> Finding {
    const CHECK: &str = "certificate";
    let ends: Option<Vec<i64>> = CertificateDer::pem_slice_iter(pem)
        .map(|der| {
            let der = der.ok()?;
            let (_, certificate) = X509Certificate::from_der(&der).ok()?;
            Some(certificate.validity().not_after.timestamp())
        })
        .collect();
    let last = ends.and_then(|ends| ends.into_iter().max());
    let why = "the API server does not trust the webhook, so pods that name a refit are refused";
    match last {
        None => Finding::wrong(
            CHECK,
            "caBundle of the webhook holds no certificate",
            why,
            "The operator writes it within seconds: see whether one runs and may patch mutatingwebhookconfigurations.",
        ),
        Some(end) if end - now < EXPIRY_SOON_S => Finding::wrong(
            CHECK,
            format!("the authority's certificate ends {}", time(end)),
            why,
            "It should have a successor: see whether the operator may update Secret weightrefit-ca; deleting the Secret makes another authority at once.",
        ),
        Some(end) => Finding::good(CHECK, format!("the authority's ends {}", time(end))),
    }
}

fn time(seconds: i64) -> String {
    Timestamp::from_second(seconds).map_or_else(|_| format!("at {seconds}"), |time| time.to_string())
}

/// Lets the API server ask the webhook about a pod that is not created.
async fn asked(cluster: &Connected, operator: &str, configuration: &str) -> Finding {
    const CHECK: &str = "webhook";
    let namespace = cluster.namespace.as_str();
    if [operator, "kube-system"].contains(&namespace) {
        return Finding::advice(
            CHECK,
            format!("not asked: pods of namespace {namespace} get no agents"),
            "the webhook leaves the operator's namespace and kube-system alone",
            "Name a namespace of trainers or engines with -n.",
        );
    }
    let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let pod = serde_json::from_value(probe(namespace)).expect("it is a pod");
    let failing =
        "pods that name a refit are refused while it lasts (failurePolicy Fail), or start without an agent";
    match api.create(&dry, &pod).await {
        Ok(pod) => {
            let containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
            match containers.map(|container| container.name.as_str()).any(|name| name == AGENT_CONTAINER) {
                true => Finding::good(CHECK, format!("a pod of namespace {namespace} gets an agent")),
                false => Finding::wrong(
                    CHECK,
                    format!("a pod of namespace {namespace} gets no agent"),
                    "the API server did not ask, or went on without an answer",
                    format!(
                        "Read the selectors, rules and failurePolicy of MutatingWebhookConfiguration {configuration}."
                    ),
                ),
            }
        }
        Err(kube::Error::Api(status)) if status.message.contains("failed calling webhook") => Finding::wrong(
            CHECK,
            status.message.clone(),
            failing,
            format!(
                "See whether the operator's pods are ready (`kubectl -n {operator} get pods,endpointslices`) and whether a network policy or firewall keeps the API server from webhook.port."
            ),
        ),
        Err(kube::Error::Api(status)) if status.message.contains("denied the request") => Finding::wrong(
            CHECK,
            status.message.clone(),
            "no pod of profile `default` can be created here",
            "Correct what the message names: most often there is no profile `default`.",
        ),
        Err(error) => Finding::unknown(CHECK, &error),
    }
}

/// A pod that even a namespace with restricted Pod Security takes.
fn probe(namespace: &str) -> Value {
    json!({
        "metadata": {
            "name": "weightrefit-doctor", "namespace": namespace,
            "labels": {REFIT_LABEL: "weightrefit-doctor", SIDE_LABEL: "inference"},
        },
        "spec": {
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "main", "image": "none",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::identity::Authority;

    #[test]
    fn an_authority_that_is_missing_or_ends_soon_is_wrong() {
        let authority = Authority::generate().unwrap();
        let pem = authority.certificate_pem();
        let (_, certificate) = X509Certificate::from_der(authority.certificate()).unwrap();
        let end = certificate.validity().not_after.timestamp();
        for (pem, now, want) in [
            (pem.as_str(), end - EXPIRY_SOON_S, Level::Good),
            (pem.as_str(), end - EXPIRY_SOON_S + 1, Level::Wrong),
            ("", 0, Level::Wrong),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", 0, Level::Wrong),
        ] {
            assert_eq!(certificates(pem.as_bytes(), now).level, want, "{pem}");
        }
    }

    #[test]
    fn schemas_are_the_same_whatever_the_api_server_does_to_numbers_and_empty_values() {
        let ours = json!({"a": [{"minimum": 1.0, "x": null}], "b": "c"});
        assert!(same(&ours, &json!({"a": [{"minimum": 1}], "b": "c", "d": null})));
        for theirs in
            [json!({"a": [{"minimum": 2}], "b": "c"}), json!({"a": [], "b": "c"}), json!({"b": "c"})]
        {
            assert!(!same(&ours, &theirs), "{theirs}");
        }
    }
}
