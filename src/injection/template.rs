//! Where the pods of a workload are written down.

use serde_json::Value;

/// Nothing that has pods, as far as is known here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoTemplate {
    /// Kind of the object.
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// JSON Pointers of the pods and pod templates of an object.
///
/// # Errors
/// The object is of a kind that has none, or none that is known here.
pub fn templates(object: &Value) -> Result<Vec<String>, NoTemplate> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let lists = |list: &str, below: &str| -> Vec<String> {
        let items = object.pointer(list).and_then(Value::as_array).map_or(0, Vec::len);
        (0..items).map(|item| format!("{list}/{item}{below}")).collect()
    };
    let places = match kind {
        "Pod" => vec![String::new()],
        "Deployment" | "StatefulSet" | "ReplicaSet" | "DaemonSet" | "Job" => {
            vec!["/spec/template".to_owned()]
        }
        "CronJob" => vec!["/spec/jobTemplate/spec/template".to_owned()],
        "JobSet" => lists("/spec/replicatedJobs", "/template/spec/template"),
        // A group may have no template of its own for its leader.
        "LeaderWorkerSet" => ["leaderTemplate", "workerTemplate"]
            .map(|name| format!("/spec/leaderWorkerTemplate/{name}"))
            .into_iter()
            .filter(|place| object.pointer(place).is_some())
            .collect(),
        _ => {
            let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            return Err(NoTemplate { kind: kind.to_owned(), name: name.to_owned() });
        }
    };
    Ok(places.into_iter().filter(|place| object.pointer(place).is_some()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn templates_are_found_where_each_kind_keeps_them() {
        let template = || json!({"spec": {}});
        let in_job = || json!({"template": {"spec": {"template": template()}}});
        for (kind, spec, want) in [
            ("Pod", json!({}), vec![""]),
            ("Deployment", json!({"template": template()}), vec!["/spec/template"]),
            ("StatefulSet", json!({"template": template()}), vec!["/spec/template"]),
            ("Job", json!({"template": template()}), vec!["/spec/template"]),
            ("Job", json!({}), vec![]),
            (
                "CronJob",
                json!({"jobTemplate": {"spec": {"template": template()}}}),
                vec!["/spec/jobTemplate/spec/template"],
            ),
            (
                "JobSet",
                json!({"replicatedJobs": [in_job(), {}, in_job()]}),
                vec![
                    "/spec/replicatedJobs/0/template/spec/template",
                    "/spec/replicatedJobs/2/template/spec/template",
                ],
            ),
            (
                "LeaderWorkerSet",
                json!({"leaderWorkerTemplate": {"workerTemplate": template()}}),
                vec!["/spec/leaderWorkerTemplate/workerTemplate"],
            ),
        ] {
            let object = json!({"kind": kind, "spec": spec});
            assert_eq!(templates(&object), Ok(want.into_iter().map(str::to_owned).collect()), "{object}");
        }
        for odd in [json!({"kind": "Service", "metadata": {"name": "web"}}), json!([]), json!(null)] {
            assert!(templates(&odd).is_err(), "{odd}");
        }
    }
}
