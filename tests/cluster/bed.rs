//! A Kubernetes API server for tests: etcd and kube-apiserver on the loopback, with RBAC, without controllers.
//!
//! No controller runs: namespaces have no accounts but those a test creates, and nothing collects what is owned.

use kube::Resource;
use kube::api::{ListParams, Patch, PatchParams, PostParams, Request};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use weightrefit::api::refit::WeightRefit;

/// For a start, which takes seconds unless the machine is busy.
const PATIENCE: Duration = Duration::from_secs(180);

/// One API server with its own etcd. It ends when it is dropped and when the process ends, in whatever way.
pub(crate) struct Bed {
    folder: PathBuf,
    /// `tests/testbed/up`; ends both programs and removes the folder when its standard input ends.
    supervisor: Child,
    client: OnceLock<kube::Client>,
    defined: OnceLock<()>,
    _ports: [ReservedPort; 2],
}

impl Bed {
    /// The bed that all tests of this process share; each works in namespaces of its own.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: LazyLock<Bed> = LazyLock::new(Bed::start);
        &SHARED
    }

    /// A bed of one's own. Several may run side by side.
    pub(crate) fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("weightrefit-bed-").tempdir().expect("a folder");
        let (etcd, api) = (ReservedPort::new(), ReservedPort::new());
        write_identities(folder.path(), &api);
        let supervisor = Command::new(checkout().join("tests/testbed/up"))
            .args([programs(), folder.path()])
            .args([etcd.address.port().to_string(), api.address.port().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // It outlives a signal to the process group of the tests, to clean up after them.
            .process_group(0)
            .spawn()
            .expect("bash starts");
        let address = api.address;
        let mut bed = Self {
            folder: folder.keep(),
            supervisor,
            client: OnceLock::new(),
            defined: OnceLock::new(),
            _ports: [etcd, api],
        };
        bed.wait_until_ready(address);
        bed
    }

    fn wait_until_ready(&mut self, address: SocketAddrV4) {
        let start = Instant::now();
        let ready = |bed: &Self| {
            TcpStream::connect(address).is_ok() && bed.try_kubectl(&["get", "--raw=/readyz"]).status.success()
        };
        while !ready(self) {
            let ended = self.supervisor.try_wait().expect("a child");
            assert!(ended.is_none(), "the API server ended; its last words are above");
            let log = || std::fs::read_to_string(self.folder.join("kube-apiserver.log")).unwrap_or_default();
            assert!(start.elapsed() < PATIENCE, "the API server is not ready: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Credentials of an administrator (`system:masters`), as the file that `KUBECONFIG` names.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// What such a file says for an account of a namespace, with a token of its own.
    pub(crate) fn config_of(&self, namespace: &str, account: &str) -> Value {
        let token = self.kubectl(&["create", "token", account, "-n", namespace]);
        let config = std::fs::read_to_string(self.kubeconfig()).expect("a file");
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config["users"][0]["user"] = json!({"token": token.trim_end()});
        config
    }

    /// Runs `kubectl` as administrator, whatever comes of it.
    pub(crate) fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_with_input(arguments, "")
    }

    /// What `kubectl` prints on standard output; it must succeed.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        succeeded(arguments, self.try_kubectl(arguments))
    }

    /// Sends documents, YAML or JSON, to `kubectl VERB -o json -f -` (`apply`, `create`, `replace`), and returns what
    /// the server made of them.
    pub(crate) fn send(&self, verb: &str, documents: impl std::fmt::Display) -> Value {
        let arguments = [verb, "-o", "json", "-f", "-"];
        let printed = succeeded(&arguments, self.kubectl_with_input(&arguments, &documents.to_string()));
        serde_json::from_str(&printed).expect("kubectl prints JSON")
    }

    /// Deletes the objects and makes them anew, as `kubectl replace --force` does.
    pub(crate) fn replace_by_force(&self, documents: &str) {
        let arguments = ["replace", "--force", "-f", "-"];
        succeeded(&arguments, self.kubectl_with_input(&arguments, documents));
    }

    /// Creates a namespace and in it the account `default`, without which it takes no pods.
    pub(crate) fn create_namespace(&self, name: &str) {
        self.kubectl(&["create", "namespace", name]);
        self.kubectl(&["create", "serviceaccount", "default", "-n", name]);
    }

    /// All refits of a namespace, as the server has them.
    pub(crate) fn refits(&self, namespace: &str) -> Vec<Value> {
        let path = WeightRefit::url_path(&(), Some(namespace));
        let list = self.ask(|| Request::new(path).list(&ListParams::default()));
        list["items"].as_array().expect("a list").clone()
    }

    /// Creates an object below this path of the API, such as `/api/v1/nodes`, unless it is there; as it then is.
    pub(crate) fn apply(&self, path: &str, object: &Value) -> Value {
        let name = object["metadata"]["name"].as_str().expect("a name");
        let parameters = PatchParams::apply("tests").force();
        self.ask(|| Request::new(path).patch(name, &parameters, &Patch::Apply(object)))
    }

    /// Changes the status of an object.
    pub(crate) fn patch_status(&self, path: &str, name: &str, status: &Value) {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(json!({"status": status})));
        self.ask(|| Request::new(path).patch_subresource("status", name, &parameters, &patch));
    }

    /// A token of the account for this audience, bound to a pod.
    pub(crate) fn token(&self, namespace: &str, account: &str, audience: &str, pod: &str) -> String {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        let of = json!({"kind": "Pod", "apiVersion": "v1", "name": pod});
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "boundObjectRef": of},
        });
        let body = request.to_string().into_bytes();
        let answer = self
            .ask(|| Request::new(path).create_subresource("token", account, &PostParams::default(), body));
        answer["status"]["token"].as_str().expect("a token").to_owned()
    }

    /// One request with the administrator's credentials, for what tests do many times: a process of `kubectl` for each
    /// would take more of the machine than all that is tested.
    fn ask<R>(&self, request: impl FnOnce() -> Result<axum::http::Request<Vec<u8>>, R>) -> Value
    where
        R: std::fmt::Debug,
    {
        static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().expect("threads"));
        let client = self.client.get_or_init(|| RUNTIME.block_on(self.client()));
        let request = request().expect("a request");
        RUNTIME.block_on(client.request(request)).expect("the server does it")
    }

    /// A client with the administrator's credentials.
    pub(crate) async fn client(&self) -> kube::Client {
        kube::Client::try_from(self.config().await).expect("a client")
    }

    /// How to reach the server with the administrator's credentials.
    pub(crate) async fn config(&self) -> kube::Config {
        let file = kube::config::Kubeconfig::read_from(self.kubeconfig()).expect("a kubeconfig");
        kube::Config::from_custom_kubeconfig(file, &Default::default()).await.expect("a configuration")
    }

    /// Makes the server know the resource WeightRefit, if it does not yet.
    pub(crate) fn define_refits(&self) {
        self.defined.get_or_init(|| self.define());
    }

    fn define(&self) {
        let crds = checkout().join("crds");
        self.kubectl(&["apply", "--server-side", "-f", crds.to_str().expect("UTF-8")]);
        let definition = "crd/weightrefits.weightrefit.dev";
        self.kubectl(&["wait", "--for=condition=Established", definition, "--timeout=60s"]);
    }

    /// Runs `kubectl` as administrator with this standard input, whatever comes of it.
    pub(crate) fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> Output {
        let mut child = Command::new(programs().join("kubectl"))
            .args(arguments)
            .env("KUBECONFIG", self.kubeconfig())
            .env("KUBECACHEDIR", self.folder.join("kubectl"))
            .env("KUBERC", "off")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        // It need not read what it is given.
        let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
        child.wait_with_output().expect("kubectl runs")
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.supervisor.stdin = None;
        let _ = self.supervisor.wait();
    }
}

fn succeeded(arguments: &[&str], output: Output) -> String {
    assert!(output.status.success(), "kubectl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Folder of etcd, kube-apiserver and kubectl. `tests/run` has built them before; a bare `cargo test` does it here,
/// which takes minutes the first time.
pub(crate) fn programs() -> &'static Path {
    static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
        let build = Command::new(checkout().join("tests/testbed/build")).stderr(Stdio::inherit()).output();
        let build = build.expect("bash starts");
        assert!(build.status.success(), "tests/testbed/build failed; its last words are above");
        PathBuf::from(String::from_utf8(build.stdout).expect("UTF-8").trim_end())
    });
    &PROGRAMS
}

/// A port of the loopback that the kernel gives to nobody else while this lives: a bound socket that never listens.
/// A server that shares it (`SO_REUSEPORT`) gets every connection.
pub(crate) struct ReservedPort {
    pub(crate) address: SocketAddrV4,
    _socket: OwnedFd,
}

impl ReservedPort {
    pub(crate) fn new() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).expect("a socket");
        sockopt::set_socket_reuseport(&socket, true).expect("SO_REUSEPORT");
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = getsockname(&socket).expect("bound").try_into().expect("IPv4");
        Self { address, _socket: socket }
    }
}

/// Writes what the API server needs to be known and to know its clients by, and the administrator's `kubeconfig`.
fn write_identities(folder: &Path, api: &ReservedPort) {
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).expect("a file");

    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
    let server = key();
    let mut params = CertificateParams::new([Ipv4Addr::LOCALHOST.to_string()]).expect("a name");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.signed_by(&server, &authority).expect("a certificate");
    write("authority.crt", authority.pem());
    write("server.crt", certificate.pem());
    write("server.key", server.serialize_pem());

    let accounts = key();
    write("accounts.key", accounts.serialize_pem());
    write("accounts.pub", accounts.public_key_pem());

    // Other users of this machine can reach the port.
    let mut random = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut random))
        .expect("random bytes");
    let token = format!("{:032x}", u128::from_ne_bytes(random));
    write("tokens.csv", format!("{token},admin,admin,system:masters\n"));
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bed", "cluster": {
            "server": format!("https://{}", api.address),
            "certificate-authority": folder.join("authority.crt"),
        }}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "admin"}}],
        "current-context": "bed",
    });
    write("kubeconfig", kubeconfig.to_string());
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
