//! What the operator of a world may do: the rules of the chart, bound as the chart binds them where it is told which namespaces
//! to look at.

use super::{World, checkout};

impl World {
    /// Operators may do what this file of the chart says, in the namespaces that they look at.
    pub(crate) fn grant(&self, file: &str) {
        let namespace = self.namespace.as_str();
        let rights = std::fs::read_to_string(checkout().join("charts/weightrefit/files").join(file));
        let rights = (rights.expect("the manifest").replace("weightrefit-system", namespace))
            .replace("weightrefit:operator", &format!("weightrefit:operator:{namespace}"))
            .replace("weightrefit:readiness", &format!("weightrefit:readiness:{namespace}"))
            .replace("weightrefit-readiness", &format!("weightrefit-readiness-{namespace}"))
            .replace("resourceNames: [weightrefit]", &format!("resourceNames: [weightrefit-{namespace}]"));
        let documents = rights.split("\n---\n").flat_map(|document| match is_bound_in_namespaces(document) {
            true => self.watched.iter().map(|watched| bound_in(document, watched)).collect(),
            false => vec![document.to_owned()],
        });
        self.bed.send("apply", documents.collect::<Vec<_>>().join("\n---\n"));
    }

    /// Another namespace that operators look at from their next start on.
    pub(crate) fn watch_too(&mut self, namespace: &str) {
        self.bed.create_namespace(namespace);
        self.watched.push(namespace.to_owned());
        self.grant("operator-rbac.yaml");
    }
}

fn is_bound_in_namespaces(document: &str) -> bool {
    document.contains("kind: ClusterRoleBinding") && !document.contains("-cluster\"")
}

fn bound_in(document: &str, namespace: &str) -> String {
    document.replace("kind: ClusterRoleBinding", "kind: RoleBinding").replacen(
        "metadata: {",
        &format!("metadata: {{namespace: {namespace}, "),
        1,
    )
}
