//! Pods before and after injection: `tests/injection/NAME.yaml` is a pod, and below `---` what it becomes, which
//! `REWRITE=1 cargo test --test injection` writes; commit that diff only when it is understood.

use k8s_openapi::api::core::v1::{PodSpec, PodTemplateSpec};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use weightrefit::api::documents::{SourceText, objects};
use weightrefit::injection::{Settings, apply, inject, quality};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/injection")
}

fn settings() -> Settings {
    let text = fs::read_to_string(folder().join("settings.yaml")).expect("settings");
    parse(&text).unwrap_or_else(|error| panic!("{error}"))
}

fn parse(text: &str) -> Result<Settings, String> {
    let source = SourceText { file: "settings.yaml".into(), text: text.into() };
    Settings::parse(&source).map_err(|error| format!("{error}. {}", error.problem.hint(&error.path)))
}

fn read(text: &str) -> Value {
    let source = SourceText { file: "pod".into(), text: text.into() };
    let mut documents = objects(&source).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(documents.len(), 1, "{text}");
    documents.remove(0)
}

fn injected(pod: &Value) -> Value {
    let mut after = pod.clone();
    apply(&mut after, &inject(pod, &settings()).unwrap_or_else(|error| panic!("{error}: {pod}")));
    after
}

fn spec(pod: &Value) -> PodSpec {
    PodTemplateSpec::deserialize(pod).expect("a pod").spec.expect("a spec")
}

/// The pods of the folder: name, text before, text after.
fn cases() -> Vec<(String, String, String)> {
    let files = fs::read_dir(folder()).expect("a folder").map(|entry| entry.expect("entry").path());
    let mut cases = Vec::new();
    for path in files {
        let name = path.file_stem().expect("a name").to_str().expect("UTF-8").to_owned();
        if name != "settings" {
            let text = fs::read_to_string(&path).expect("text");
            let (before, after) = text.split_once("---\n").unwrap_or((&text, ""));
            cases.push((name, before.to_owned(), after.to_owned()));
        }
    }
    cases.sort();
    assert!(cases.len() >= 11, "{cases:?}");
    cases
}

#[test]
fn pods_become_what_is_written_below_them() {
    for (name, before, want) in cases() {
        let got = serde_saphyr::to_string(&injected(&read(&before))).expect("YAML");
        if std::env::var_os("REWRITE").is_some() {
            fs::write(folder().join(name).with_extension("yaml"), format!("{before}---\n{got}"))
                .expect("a file");
        } else {
            assert_eq!(got, want, "{name}");
        }
    }
}

#[test]
fn what_is_injected_is_a_pod_is_done_once_and_keeps_all_that_was_there() {
    for (name, before, _) in cases() {
        let before = read(&before);
        let after = injected(&before);
        assert_eq!(inject(&after, &settings()).expect("injected before"), [], "{name}");
        assert_eq!(quality(&spec(&before)), quality(&spec(&after)), "{name}");
        assert!(is_within(&before, &after), "{name}: {before} is not within {after}");
    }
}

#[test]
fn a_container_that_is_added_later_gets_what_the_pod_has_whatever_the_profile_says_by_then() {
    let of = |profile: &str| {
        let (_, before, _) =
            cases().into_iter().find(|(name, ..)| name == "in_process_engine").expect("a case");
        let mut pod = injected(&read(&before));
        pod["spec"]["containers"]
            .as_array_mut()
            .expect("a list")
            .push(json!({"name": "late", "image": "late"}));
        pod["metadata"]["annotations"]["weightrefit.dev/profile"] = json!(profile);
        injected(&pod)
    };
    let variables = |pod: &Value| {
        let late = pod["spec"]["containers"].as_array().expect("a list").last().expect("one").clone();
        assert_eq!(late["volumeMounts"].as_array().expect("a list").len(), 2, "{late}");
        late["env"].as_array().expect("a list").iter().map(|own| own["name"].clone()).collect::<Vec<_>>()
    };
    for profile in ["in-process", "default"] {
        let pod = of(profile);
        assert_eq!(variables(&pod), ["WEIGHTREFIT_SOCKET", "WEIGHTREFIT_LIBRARY"], "{profile}");
        assert_eq!(pod["spec"]["initContainers"].as_array().expect("a list").len(), 3, "{profile}");
    }
}

/// Whether `after` has all that `before` has: every key, and of lists every element, in order.
fn is_within(before: &Value, after: &Value) -> bool {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            before.iter().all(|(key, value)| after.get(key).is_some_and(|other| is_within(value, other)))
        }
        (Value::Array(before), Value::Array(after)) => {
            let mut rest = after.iter();
            before.iter().all(|value| rest.any(|other| is_within(value, other)))
        }
        _ => before == after,
    }
}

/// A pod that can be injected, with one part changed, and what is then said.
#[test]
fn what_is_in_the_way_is_named_with_the_remedy() {
    let pod = || {
        json!({
            "metadata": {
                "name": "vllm-0", "namespace": "serve",
                "labels": {"weightrefit.dev/refit": "qwen", "weightrefit.dev/side": "inference"},
                "annotations": {},
            },
            "spec": {"containers": [{"name": "engine", "image": "vllm"}], "initContainers": [], "volumes": []},
        })
    };
    let label = "/metadata/labels/weightrefit.dev~1";
    let profile = |name: &str| ("/metadata/annotations".to_owned(), json!({"weightrefit.dev/profile": name}));
    let main = |part: &str, value| (format!("/spec/containers/0/{part}"), value);
    let at = |path: &str, value| (path.to_owned(), value);
    for ((path, value), want) in [
        (at(&format!("{label}side"), json!("serving")), "label weightrefit.dev/side of value `serving`"),
        (at(&format!("{label}refit"), json!("Q wen")), "label weightrefit.dev/refit of value `Q wen`"),
        (
            at(&format!("{label}refit-namespace"), json!("")),
            "label weightrefit.dev/refit-namespace of value ``",
        ),
        (at(&format!("{label}pool"), json!("A/B")), "label weightrefit.dev/pool of value `A/B`"),
        (profile("lrage"), "no injection profile `lrage`. Did you mean `large`?"),
        (profile(""), "no injection profile ``"),
        (profile("claim"), "container `engine` uses no resource claim, and injection profile `claim` has"),
        (
            profile("claim"),
            "Name a claim of spec.resourceClaims under resources.claims of container `engine`",
        ),
        (
            profile("visible"),
            "`visible` has deviceAccess VisibleDevices, which this version does not support",
        ),
        (at("/spec/containers", json!([])), "pod has no container. Add the trainer's or engine's"),
        (at("/spec/os", json!({"name": "windows"})), "spec.os.name of the pod is not linux"),
        (at("/spec/shareProcessNamespace", json!(true)), "sets shareProcessNamespace"),
        (at("/spec/hostPID", json!(true)), "`sharedProcesses: true` in injection profile `default`"),
        (
            at("/spec/initContainers", json!([{"name": "weightrefit-agent"}])),
            "container `weightrefit-agent` of its own",
        ),
        (main("name", json!("weightrefit-agent")), "container `weightrefit-agent` of its own"),
        (
            at("/spec/volumes", json!([{"name": "weightrefit-socket"}])),
            "volume `weightrefit-socket` of its own",
        ),
        (
            at("/spec/volumes", json!([{"name": "weightrefit-identity"}])),
            "volume `weightrefit-identity` of its own",
        ),
        (
            main("volumeMounts", json!([{"name": "x", "mountPath": "/run/weightrefit/"}])),
            "mounts /run/weightrefit/",
        ),
        (
            main("volumeMounts", json!([{"name": "x", "mountPath": "/run/weightrefit/a"}])),
            "mounts /run/weightrefit/a, and /run/weightrefit must be",
        ),
        (
            at("/spec/initContainers", json!([{"name": "weightrefit-library"}])),
            "container `weightrefit-library` of its own",
        ),
        (main("env", json!([{"name": "WEIGHTREFIT_SOCKET"}])), "container `engine` sets WEIGHTREFIT_SOCKET"),
        (main("ports", json!([{"containerPort": 9464}])), "container `engine` has port 9464"),
        (at("/spec/containers", json!({})), "this is no pod"),
        (at("/spec/containers", json!([{"image": 1}])), "this is no pod"),
        (at("/metadata/labels", json!([])), "this is no pod"),
    ] {
        let mut pod = pod();
        let (parent, key) = path.rsplit_once('/').expect("a pointer");
        pod.pointer_mut(parent).expect(parent)[key.replace("~1", "/")] = value;
        let error = inject(&pod, &settings()).expect_err(want);
        let said = format!("{error}. {}", error.hint());
        assert!(said.contains(want), "{said}\nwant: {want}");
    }
    assert!(inject(&pod(), &settings()).is_ok(), "nothing else was in the way");
    for ((path, value), want) in [
        (
            at("/spec/volumes", json!([{"name": "weightrefit-library"}])),
            "volume `weightrefit-library` of its own",
        ),
        (
            main("volumeMounts", json!([{"name": "x", "mountPath": "/run/weightrefit-library"}])),
            "Mount it elsewhere than /run/weightrefit-library",
        ),
        (
            main("env", json!([{"name": "WEIGHTREFIT_LIBRARY"}])),
            "container `engine` sets WEIGHTREFIT_LIBRARY",
        ),
    ] {
        let mut pod = pod();
        let (parent, key) = path.rsplit_once('/').expect("a pointer");
        pod.pointer_mut(parent).expect(parent)[key] = value;
        assert!(inject(&pod, &settings()).is_ok(), "{path} is in the way of profile in-process alone");
        pod["metadata"]["annotations"]["weightrefit.dev/profile"] = json!("in-process");
        let error = inject(&pod, &settings()).expect_err(want);
        let said = format!("{error}. {}", error.hint());
        assert!(said.contains(want), "{said}\nwant: {want}");
    }
    for odd in [json!(null), json!([]), json!("pod"), json!({"metadata": 1})] {
        assert!(inject(&odd, &settings()).is_err(), "{odd}");
    }
    assert_eq!(inject(&json!({}), &settings()), Ok(vec![]), "names no refit");
}

#[test]
fn settings_that_cannot_work_are_refused_with_their_line() {
    let good = "image: agent:1\ncoordinator: operator:7443\nprofiles: {default: {}}\n";
    assert!(parse(good).is_ok());
    for (old, new, want) in [
        ("image: agent:1\n", "", "required key `image` is missing"),
        ("profiles: {default: {}}\n", "", "required key `profiles` is missing"),
        ("agent:1", "''", "settings.yaml:1:1: image: `` is not an image"),
        ("operator:7443", "operator", "`operator` is not host:port"),
        ("operator:7443", ":7443", "`:7443` is not host:port"),
        ("operator:7443", "operator:0", "`operator:0` is not host:port"),
        ("default: {}", "default: {gpu: 1}", "unknown key `gpu`"),
        ("default: {}", "default: {deviceAccess: Gpu}", "unknown value `Gpu`"),
        ("default: {}", "default: {memory: lots}", "`lots` is not a quantity above 0"),
        ("default: {}", "default: {cpu: '0'}", "`0` is not a quantity above 0"),
        ("default: {}", "default: {metricsPort: 0}", "0 is not between 1 and 65535"),
        ("default: {}", "default: {sharedProcesses: yes}", "`yes` means different things"),
        ("profiles", "tokenExpirationSeconds: 5\nprofiles", "5 is not between 600 and 86400"),
        ("profiles", "---\nprofiles", "the file has 2 documents"),
    ] {
        assert!(good.contains(old), "{old}");
        let error = parse(&good.replace(old, new)).expect_err(new);
        assert!(error.contains(want), "{error}\nwant: {want}");
    }
}
