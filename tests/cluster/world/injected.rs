//! Pods that the webhook has injected: what a kubelet makes of an agent's container.

use super::{AUDIENCE, Pod, World, program, wait_for};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use weightrefit::identity::CA_BUNDLE_KEY;

/// How the operator of a world serves its webhook.
pub(crate) struct Webhook {
    settings: PathBuf,
    configuration: String,
    listen: String,
    /// Of all agents, each at an address of its own.
    pub(crate) metrics_port: u16,
    _port: OwnedFd,
}

impl Webhook {
    pub(super) fn flags(&self) -> [String; 8] {
        let settings = self.settings.to_str().expect("UTF-8");
        [
            ("--webhook-listen", self.listen.as_str()),
            ("--webhook-host", "127.0.0.1"),
            ("--injection", settings),
            ("--webhook-configuration", &self.configuration),
        ]
        .map(|(flag, value)| [flag.to_owned(), value.to_owned()])
        .concat()
        .try_into()
        .expect("four pairs")
    }
}

impl World {
    /// Starts an operator that injects the pods of this namespace, and waits until the API server asks it.
    pub(crate) fn start_injecting_operator(&mut self) {
        // Agents are told where it listens, and the API server too: its first start says where that is.
        self.start_operator();
        self.kill_operator();
        let (port, metrics_port) = reserved();
        let settings = json!({
            "image": "agent:test",
            "coordinator": self.agents.as_deref().expect("it was started"),
            "audience": AUDIENCE,
            "profiles": {
                "default": {"metricsPort": metrics_port},
                "claim": {"deviceAccess": "ResourceClaim"},
                "in-process": {"deviceAccess": "InProcess"},
            },
        });
        std::fs::write(self.settings(), settings.to_string()).expect("a file");
        let configuration = format!("weightrefit-{}", self.namespace);
        let listen = "127.0.0.1:0".to_owned();
        let webhook = Webhook { settings: self.settings(), configuration, listen, metrics_port, _port: port };
        self.webhook = Some(webhook);
        self.start_operator();
        let operator = self.operator.as_ref().expect("an operator");
        let address = wait_for("the webhook serves", || {
            let log = operator.log();
            let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.filter_map(|line| line["fields"]["webhook"].as_str().map(str::to_owned)).next()
        });
        self.webhook.as_mut().expect("it was made").listen = address;
        self.configure_webhook();
        self.wait("the API server asks the webhook", |world| {
            let claim = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "training"});
            let created = world.try_create(&world.bare_pod("probe", claim), true);
            created.is_ok_and(|pod| agent_of(&pod).is_some())
        });
    }

    /// Writes the webhook configuration as a chart does, without `caBundle`.
    pub(crate) fn configure_webhook(&self) {
        let webhook = self.webhook.as_ref().expect("the operator serves one");
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": webhook.configuration},
            "webhooks": [{
                "name": "inject.weightrefit.dev",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "reinvocationPolicy": "IfNeeded",
                "clientConfig": {"url": format!("https://{}/mutate", webhook.listen)},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
                "objectSelector": {"matchExpressions": [{"key": "weightrefit.dev/refit", "operator": "Exists"}]},
                "rules": [{
                    "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
                }],
            }],
        });
        let verb = if self.ca_bundle().is_some() { "replace" } else { "apply" };
        self.bed.send(verb, configuration);
    }

    /// `caBundle` of the configuration, base64; `None` while there is no configuration.
    pub(crate) fn ca_bundle(&self) -> Option<String> {
        let name = &self.webhook.as_ref().expect("the operator serves one").configuration;
        let path = "jsonpath={.webhooks[0].clientConfig.caBundle}";
        let output = self.bed.try_kubectl(&["get", "mutatingwebhookconfiguration", name, "-o", path]);
        output.status.success().then(|| String::from_utf8(output.stdout).expect("UTF-8"))
    }

    /// Port of every injected agent's probes.
    pub(crate) fn probe_port(&self) -> u16 {
        self.webhook.as_ref().expect("the operator serves one").metrics_port
    }

    /// The injection settings.
    pub(crate) fn settings(&self) -> PathBuf {
        self.path("injection.yaml")
    }

    /// A pod with these labels and one container.
    pub(crate) fn bare_pod(&self, name: &str, labels: Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
            // Where its own token is mounted, and under what name, the API server draws anew for each pod.
            "spec": {"automountServiceAccountToken": false, "containers": [{"name": "main", "image": "none"}]},
        })
    }

    /// What the API server makes of it, or says.
    pub(crate) fn try_create(&self, pod: &Value, is_dry: bool) -> Result<Value, String> {
        let dry = if is_dry { "--dry-run=server" } else { "--dry-run=none" };
        let arguments = ["create", dry, "-o", "json", "-f", "-"];
        let output = self.bed.kubectl_with_input(&arguments, &pod.to_string());
        match output.status.success() {
            true => Ok(serde_json::from_slice(&output.stdout).expect("JSON")),
            false => Err(String::from_utf8(output.stderr).expect("UTF-8")),
        }
    }

    /// The command of the pod's agent as its container says; `None` where it has none.
    pub(super) fn injected_agent(&self, name: &str) -> Option<Command> {
        let pod = &self.pods[name];
        let agent = agent_of(&pod.created)?;
        self.mount(name, pod);
        let mut command = Command::new(program("weightrefit-agent"));
        for argument in list(&agent["args"]) {
            let mut argument = argument.as_str().expect("text").to_owned();
            for variable in list(&agent["env"]) {
                let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                    Some("metadata.namespace") => self.namespace.clone(),
                    Some("metadata.uid") => pod.uid.clone(),
                    Some("status.podIP") => self.address(pod.side, pod.ordinal),
                    other => panic!("{other:?} is no field that a kubelet fills in here"),
                };
                argument =
                    argument.replace(&format!("$({})", variable["name"].as_str().expect("a name")), &value);
            }
            command.arg(self.mounted(name, agent, &argument));
        }
        command.args(["--exit-with-parent", &std::process::id().to_string()]);
        Some(command)
    }

    /// Where clients of the pod connect.
    pub(super) fn socket(&self, name: &str) -> PathBuf {
        let main = &self.pods[name].created["spec"]["containers"][0];
        let mut variables = list(&main["env"]);
        match variables.find(|variable| variable["name"] == "WEIGHTREFIT_SOCKET") {
            Some(variable) => self.mounted(name, main, variable["value"].as_str().expect("text")).into(),
            None => self.path(&format!("{name}.agent")),
        }
    }

    /// The text with the container's mount paths replaced by folders of this machine.
    fn mounted(&self, name: &str, container: &Value, text: &str) -> String {
        let mut text = text.to_owned();
        for mount in list(&container["volumeMounts"]) {
            let part = |key: &str| mount[key].as_str().expect("text");
            let folder = self.volume(name, part("name"));
            text = text.replace(part("mountPath"), folder.to_str().expect("UTF-8"));
        }
        text
    }

    fn volume(&self, pod: &str, volume: &str) -> PathBuf {
        self.path(&format!("{pod}.{}", volume.trim_start_matches("weightrefit-")))
    }

    /// Fills the volumes that the pod names.
    fn mount(&self, name: &str, pod: &Pod) {
        for volume in list(&pod.created["spec"]["volumes"]) {
            let folder = self.volume(name, volume["name"].as_str().expect("a name"));
            std::fs::create_dir_all(&folder).expect("a folder");
            for source in list(&volume["projected"]["sources"]) {
                let token = &source["serviceAccountToken"];
                if let (Some(audience), Some(path)) = (token["audience"].as_str(), token["path"].as_str()) {
                    let request = format!(
                        "create token {} -n {} --audience={audience} --duration={}s --bound-object-kind=Pod --bound-object-name={name}",
                        pod.side.owner(),
                        self.namespace,
                        token["expirationSeconds"],
                    );
                    let token = self.bed.kubectl(&request.split(' ').collect::<Vec<_>>());
                    std::fs::write(folder.join(path), token.trim_end()).expect("a file");
                }
                for item in list(&source["configMap"]["items"]) {
                    assert_eq!(item["key"], CA_BUNDLE_KEY);
                    let path = folder.join(item["path"].as_str().expect("text"));
                    std::fs::copy(self.path("bundle.pem"), path).expect("a file");
                }
            }
        }
    }
}

/// The agent's container, where the pod was injected.
pub(crate) fn agent_of(pod: &Value) -> Option<&Value> {
    list(&pod["spec"]["initContainers"]).find(|container| container["name"] == "weightrefit-agent")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A port of the first trainer's address that the kernel gives to nobody else: bound, and never listening.
fn reserved() -> (OwnedFd, u16) {
    let socket =
        socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
    sockopt::set_socket_reuseaddr(&socket, true).expect("SO_REUSEADDR");
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::new(127, 0, 1, 1), 0)).expect("a free port");
    let address: SocketAddrV4 = getsockname(&socket).expect("bound").try_into().expect("IPv4");
    (socket, address.port())
}
