//! The quality of service class of a pod, by Kubernetes' own rule: it must be the same before and after.

use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// What decides the class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quality {
    /// Every container has limits of cpu and memory, and requests just those.
    Guaranteed,
    /// Anything between.
    Burstable,
    /// No container requests or limits either.
    BestEffort,
    /// The pod's own resources, whatever its containers ask for.
    OfPod,
}

/// What decides the class of this pod. A request that is not there is that of the limit, as the API server fills it in.
#[must_use]
pub fn quality(spec: &PodSpec) -> Quality {
    let of_pod = spec.resources.as_ref();
    if of_pod.is_some_and(|own| own.limits.is_some() || own.requests.is_some()) {
        return Quality::OfPod;
    }
    let containers = || spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let each = |test: fn(Amount) -> bool| {
        containers().all(|container| RESOURCES.iter().all(|resource| test(amount(container, resource))))
    };
    if each(|amount| amount.request.is_none() && amount.limit.is_none()) {
        return Quality::BestEffort;
    }
    match each(|amount| amount.limit.is_some() && amount.request.is_none_or(|own| Some(own) == amount.limit))
    {
        true => Quality::Guaranteed,
        false => Quality::Burstable,
    }
}

/// Only these two count.
const RESOURCES: [&str; 2] = ["cpu", "memory"];

/// In units of 10^-9; nothing where it is 0, which says nothing.
#[derive(Clone, Copy)]
struct Amount {
    request: Option<i128>,
    limit: Option<i128>,
}

fn amount(container: &Container, resource: &str) -> Amount {
    let of = |map: Option<&std::collections::BTreeMap<String, Quantity>>| {
        map?.get(resource).and_then(|quantity| nano(&quantity.0)).filter(|nano| *nano > 0)
    };
    let resources = container.resources.as_ref();
    Amount {
        request: of(resources.and_then(|own| own.requests.as_ref())),
        limit: of(resources.and_then(|own| own.limits.as_ref())),
    }
}

/// A quantity in units of 10^-9, rounded down; `None` where it is none, or beyond 10^27.
pub(super) fn nano(quantity: &str) -> Option<i128> {
    let end = quantity.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(quantity.len());
    let (number, suffix) = quantity.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || whole.len() > 18 || fraction.contains('.') {
        return None;
    }
    let digits = format!("{whole}{:0<9.9}", fraction);
    let nano: i128 = digits.parse().ok()?;
    let power = |base: i128, exponent: u32| nano.checked_mul(base.checked_pow(exponent)?);
    match suffix {
        "n" => Some(nano / 1_000_000_000),
        "u" => Some(nano / 1_000_000),
        "m" => Some(nano / 1_000),
        "" => Some(nano),
        "k" => power(1000, 1),
        "M" => power(1000, 2),
        "G" => power(1000, 3),
        "T" => power(1000, 4),
        "P" => power(1000, 5),
        "E" => power(1000, 6),
        "Ki" => power(1024, 1),
        "Mi" => power(1024, 2),
        "Gi" => power(1024, 3),
        "Ti" => power(1024, 4),
        "Pi" => power(1024, 5),
        "Ei" => power(1024, 6),
        _ => power(10, suffix.strip_prefix(['e', 'E'])?.parse().ok().filter(|exponent| *exponent <= 18)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_compared_by_what_they_amount_to() {
        for (same, as_) in [
            ("1", "1000m"),
            ("1.5", "1500m"),
            ("2Gi", "2048Mi"),
            ("1e3", "1k"),
            ("0.5Gi", "512Mi"),
            ("1E", "1e18"),
        ] {
            assert_eq!(nano(same), nano(as_), "{same} {as_}");
            assert!(nano(same).is_some(), "{same}");
        }
        for none in ["", "m", "1 Gi", "-1", "1.2.3", "one", "9999999999999999999", "1e99", "1Zi", "."] {
            assert_eq!(nano(none), None, "{none}");
        }
        assert_eq!(nano("0"), Some(0));
    }

    /// One container a word: `request/limit` of cpu and memory alike, `-` for none.
    #[test]
    fn the_class_is_kubernetes_own() {
        for (containers, want) in [
            ("-/-", Quality::BestEffort),
            ("0/0", Quality::BestEffort),
            ("1/1", Quality::Guaranteed),
            ("-/1", Quality::Guaranteed),
            ("1000m/1", Quality::Guaranteed),
            ("1/2", Quality::Burstable),
            ("1/-", Quality::Burstable),
            ("1/1 -/-", Quality::Burstable),
            ("1/1 2/2", Quality::Guaranteed),
        ] {
            let container = |word: &str| {
                let part = |text: &str| match text {
                    "-" => serde_json::json!({}),
                    some => serde_json::json!({"cpu": some, "memory": some}),
                };
                let (request, limit) = word.split_once('/').expect("two parts");
                let resources = serde_json::json!({"requests": part(request), "limits": part(limit)});
                serde_json::json!({"name": "c", "resources": resources})
            };
            let containers_json: Vec<_> = containers.split(' ').map(container).collect();
            let spec: PodSpec =
                serde_json::from_value(serde_json::json!({"containers": containers_json})).expect("a spec");
            assert_eq!(quality(&spec), want, "{containers}");
        }
    }
}
