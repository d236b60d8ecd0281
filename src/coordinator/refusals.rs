//! How often agents and strangers were refused, by where and why.

use prometheus::core::Collector;
use prometheus::{IntCounterVec, Opts};
use weightrefit_core::code::Code;
use weightrefit_proto::v1;

/// Where somebody is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// Before anything was asked: TLS, HTTP/2, too many connections.
    Connect,
    /// Enrol.
    Enrol,
    /// The first message of a stream.
    Join,
    /// A later one.
    Stream,
}

impl At {
    const ALL: [Self; 4] = [Self::Connect, Self::Enrol, Self::Join, Self::Stream];

    const fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Enrol => "enrol",
            Self::Join => "join",
            Self::Stream => "stream",
        }
    }
}

/// Counts them; clones count together.
#[derive(Debug, Clone)]
pub struct Refusals(IntCounterVec);

impl Default for Refusals {
    fn default() -> Self {
        let help = "Agents and strangers refused, by where and code.";
        let opts = Opts::new("weightrefit_operator_refusals_total", help);
        let counter = IntCounterVec::new(opts, &["at", "code"]).expect("name and labels are well formed");
        // A counter that is there from the start shows its first increase.
        At::ALL
            .iter()
            .for_each(|at| drop(counter.with_label_values(&[at.name(), Code::Unauthenticated.name()])));
        Self(counter)
    }
}

impl Refusals {
    /// For the registry of whoever serves metrics.
    #[must_use]
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.0.clone())
    }

    /// Counts a fault that was made here, whose code is one of ours.
    pub(super) fn count(&self, at: At, fault: &v1::Fault) {
        let code = fault.code.parse().unwrap_or(Code::Unsupported);
        self.0.with_label_values(&[at.name(), code.name()]).inc();
    }
}
