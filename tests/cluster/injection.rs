//! The admission webhook, asked by a real API server, and the agents that it puts into pods.

use crate::commands::weightrefit;
use crate::world::injected::agent_of;
use crate::world::{Side, World, condition};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use weightrefit::identity::CA_SECRET;

fn claim(side: &str) -> Value {
    json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": side})
}

/// One probe of a kubelet.
fn probe(world: &World, ip: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect((ip, world.probe_port())).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1).map(str::to_owned)
}

#[test]
fn agents_of_injected_pods_take_part_and_are_ready_when_they_serve() {
    let mut world = World::consenting("injected");
    world.start_injecting_operator();
    world.apply();
    world.start_pods();
    world.wait("every agent has started", |world| {
        ["127.0.1.1", "127.0.1.3", "127.0.2.1"]
            .iter()
            .all(|ip| probe(world, ip, "/livez").as_deref() == Some("200"))
    });
    world.wait_for_status("all are connected", |status| condition(status, "CommunicatorsReady").0 == "True");
    assert_eq!(probe(&world, "127.0.1.1", "/readyz").as_deref(), Some("200"), "trainers do not serve");
    assert_eq!(probe(&world, "127.0.2.1", "/readyz").as_deref(), Some("503"));
    world.refit(0);
    world.wait("each rank of both replicas is right", |world| world.checks(0) == 4);
    world.wait("engines are ready", |world| {
        ["127.0.2.1", "127.0.2.2"].iter().all(|ip| probe(world, ip, "/readyz").as_deref() == Some("200"))
    });
}

#[test]
fn injected_pods_start_without_an_operator_and_their_refit_waits_for_one() {
    let mut world = World::consenting("away");
    world.start_injecting_operator();
    world.apply();
    (0..3).for_each(|ordinal| world.create_pod(Side::Training, ordinal));
    (0..2).for_each(|ordinal| world.create_pod(Side::Inference, ordinal));
    world.fetch_bundle();
    world.kill_operator();
    world.run_pods();
    world.wait("every agent has started", |world| {
        ["127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.2.1", "127.0.2.2"]
            .iter()
            .all(|ip| probe(world, ip, "/livez").as_deref() == Some("200"))
    });
    assert_eq!(probe(&world, "127.0.2.1", "/readyz").as_deref(), Some("503"));
    world.publish(0);
    assert!(!world.has_memory_back(0), "nobody leads yet");
    world.start_operator();
    world.wait("the step that waited is released", |world| world.has_memory_back(0));
    world.wait("each rank of both replicas is right", |world| world.checks(0) == 4);
}

#[test]
fn pods_are_injected_or_refused_or_left_alone() {
    let mut world = World::new("admitted");
    world.start_injecting_operator();
    let pod = world.try_create(&world.bare_pod("engine-0", claim("inference")), true).expect("created");
    let agent = agent_of(&pod).expect("injected");
    assert_eq!((&agent["restartPolicy"], &agent["image"]), (&json!("Always"), &json!("agent:test")));
    assert_eq!(pod["status"]["qosClass"], "BestEffort", "{pod:#}");

    let refused = world.try_create(&world.bare_pod("odd-0", claim("sideways")), true).expect_err("refused");
    assert!(refused.contains("label weightrefit.dev/side of value `sideways`"), "{refused}");
    assert!(refused.contains("Correct the label"), "{refused}");

    // What is in the way, as a person who creates the pod is told.
    let bare = || world.bare_pod("odd-0", claim("inference"));
    let with = |pointer: &str, key: &str, value: Value| {
        let mut pod = bare();
        pod.pointer_mut(pointer).expect(pointer)[key] = value;
        pod
    };
    let annotated =
        |profile: &str| with("/metadata", "annotations", json!({"weightrefit.dev/profile": profile}));
    let taken = json!([{"name": "weightrefit-socket", "emptyDir": {}}]);
    let both = json!([{"name": "x", "mountPath": "/run/weightrefit"}]);
    for (pod, want) in [
        (
            with("/spec", "containers", json!([])),
            "pod has no container. Add the trainer's or engine's container",
        ),
        (
            with("/spec", "volumes", taken),
            "pod has a volume `weightrefit-socket` of its own. Rename that volume",
        ),
        (
            with("/spec/containers/0", "volumeMounts", both),
            "mounts /run/weightrefit, and /run/weightrefit must be",
        ),
        (annotated("missing"), "there is no injection profile `missing`"),
        (annotated("claim"), "container `main` uses no resource claim"),
    ] {
        let refused = world.try_create(&pod, true).expect_err(want);
        assert!(refused.contains(want), "{refused}\nwant: {want}");
    }

    // Devices of a claim are shared, for as long as the claim lives by the API server.
    let mut claimed = annotated("claim");
    claimed["spec"]["resourceClaims"] = json!([{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]);
    claimed["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpus"}]});
    let created = world.try_create(&claimed, true).expect("created");
    assert_eq!(agent_of(&created).expect("injected")["resources"], json!({"claims": [{"name": "gpus"}]}));

    // The library comes before anything else, and the agent after it.
    let created = world.try_create(&annotated("in-process"), true).expect("created");
    let inits = created["spec"]["initContainers"].as_array().expect("a list");
    let names: Vec<_> = inits.iter().map(|container| container["name"].as_str().expect("text")).collect();
    assert_eq!(names, ["weightrefit-library", "weightrefit-agent"]);
    let variables = created["spec"]["containers"][0]["env"].to_string();
    assert!(variables.contains("/run/weightrefit-library/libweightrefit.so"), "{variables}");

    // Containers of the host network have their ports on the node.
    let created = world.try_create(&with("/spec", "hostNetwork", json!(true)), true).expect("created");
    let port = &agent_of(&created).expect("injected")["ports"][0];
    assert_eq!(port["hostPort"], port["containerPort"]);

    // More than the API server takes it does not ask about.
    let mut huge = bare();
    huge["spec"]["containers"][0]["env"] = json!([{"name": "HUGE", "value": "x".repeat(10 << 20)}]);
    let refused = world.try_create(&huge, true).expect_err("10 MiB");
    assert!(refused.contains("too large") || refused.contains("limit"), "{refused}");

    let mut large = world.bare_pod("large-0", claim("training"));
    large["spec"]["containers"][0]["env"] = json!([{"name": "LARGE", "value": "x".repeat(1 << 20)}]);
    let large = world.try_create(&large, true).expect("created");
    assert!(agent_of(&large).is_some(), "1 MiB is no reason");

    // What the command prints is the same pod to the API server, and is not injected again.
    let bare = world.bare_pod("engine-0", claim("inference"));
    let file = world.settings().with_file_name("pod.json");
    std::fs::write(&file, bare.to_string()).expect("a file");
    let (file, settings) = (file.to_str().expect("UTF-8").to_owned(), world.settings());
    let settings = settings.to_str().expect("UTF-8");
    let printed = weightrefit(world.bed, &["inject", "-f", &file, "--settings", settings]);
    assert_eq!(printed.code, Some(0), "{}", printed.err);
    let arguments = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
    let output = world.bed.kubectl_with_input(&arguments, &printed.out);
    let same: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(same["spec"], pod["spec"]);

    // Without the operator pods of refits wait, and nobody else's do.
    world.kill_operator();
    let refused =
        world.try_create(&world.bare_pod("engine-1", claim("inference")), true).expect_err("refused");
    assert!(refused.contains("inject.weightrefit.dev"), "{refused}");
    let other = world.try_create(&world.bare_pod("web-0", json!({"app": "web"})), true).expect("created");
    assert!(agent_of(&other).is_none());
}

#[test]
fn the_trust_of_the_api_server_is_mended_when_the_configuration_is_applied_anew() {
    let mut world = World::new("trust");
    world.start_injecting_operator();
    let bundle = world.ca_bundle().expect("a configuration");
    assert!(!bundle.is_empty());
    let asks = |world: &World| {
        let created = world.try_create(&world.bare_pod("engine-0", claim("inference")), true);
        created.is_ok_and(|pod| agent_of(&pod).is_some())
    };
    world.configure_webhook();
    world.wait("the bundle is there again", |world| world.ca_bundle().as_ref() == Some(&bundle));
    world.wait("the API server asks again", |world| asks(world));

    // Another authority signs another certificate, which is served and trusted from then on.
    world.bed.kubectl(&["delete", "secret", CA_SECRET, "-n", "trust"]);
    world.wait("another authority is trusted", |world| world.ca_bundle().is_some_and(|now| now != bundle));
    world.wait("the API server asks again", |world| asks(world));
}
