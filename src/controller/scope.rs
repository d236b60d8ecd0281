//! Which namespaces the operator looks at.

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};

/// All namespaces, or some.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// Each once; all namespaces where there is none.
    namespaces: Vec<String>,
}

impl Scope {
    /// These namespaces, or all where there is none.
    #[must_use]
    pub fn of(mut namespaces: Vec<String>) -> Self {
        namespaces.sort();
        namespaces.dedup();
        Self { namespaces }
    }

    /// What one watch each is for: a namespace, or all of them.
    #[must_use]
    pub fn parts(&self) -> Vec<Option<String>> {
        match self.namespaces.as_slice() {
            [] => vec![None],
            some => some.iter().cloned().map(Some).collect(),
        }
    }

    /// Whether the operator looks at this namespace.
    #[must_use]
    pub fn has(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|own| own == namespace)
    }
}

/// Objects of a part of a scope.
pub fn api<K>(client: &Client, part: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match part {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_some_namespaces_each_once_or_all() {
        let some = Scope::of(["rl", "serve", "rl"].map(str::to_owned).to_vec());
        assert_eq!(some.parts(), ["rl", "serve"].map(|name| Some(name.to_owned())));
        assert!(some.has("rl") && some.has("serve") && !some.has("kube-system"));
        let all = Scope::of(Vec::new());
        assert!(all.parts() == [None] && all.has("kube-system"));
    }
}
