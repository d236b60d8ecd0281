//! The stable interface `weightrefit.plan/v1`: a plan as JSON, written without holding all boxes at once.

use super::moves::{Dims, Endpoint, MoveBox};
use super::{Plan, PlanBytes, Summary};
use crate::id::Sha256;
use serde::Serialize;
use serde::ser::{SerializeSeq, Serializer};
use serde_json::Value;

/// Value of the key `schema`.
pub const SCHEMA: &str = "weightrefit.plan/v1";

/// A plan ready to be serialized. `boxes` are written only when asked for.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    schema: &'static str,
    digest: &'a Sha256,
    training: Training,
    inference: Vec<Inference<'a>>,
    bytes: &'a PlanBytes,
    routes: Routes<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    boxes: Option<Boxes<'a>>,
}

#[derive(Debug, Serialize)]
struct Training {
    ranks: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<Value>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inference<'a> {
    pool: &'a str,
    replicas: u64,
    replica_names: &'a [String],
    ranks_per_replica: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<Value>,
}

#[derive(Serialize)]
struct RouteEntry<'a> {
    source: EndpointEntry<'a>,
    destination: EndpointEntry<'a>,
    stage: u32,
    kind: &'static str,
    bytes: u64,
    boxes: u64,
}

#[derive(Serialize)]
#[serde(tag = "side", rename_all = "lowercase")]
enum EndpointEntry<'a> {
    Training { rank: u32 },
    Inference { pool: &'a str, replica: u32, rank: u32 },
}

#[derive(Serialize)]
struct BoxEntry<'a> {
    route: usize,
    tensor: &'a str,
    dtype: &'static str,
    shape: &'a [u64],
    hf: &'a [u64],
    source: PlaceEntry<'a>,
    destination: PlaceEntry<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permute: Option<&'a [u8]>,
}

#[derive(Serialize)]
struct PlaceEntry<'a> {
    tensor: &'a str,
    start: &'a [u64],
}

#[derive(Debug)]
struct Routes<'a>(&'a Plan, &'a Summary);

#[derive(Debug)]
struct Boxes<'a>(&'a Plan);

impl<'a> Document<'a> {
    /// `summary` is the plan's own.
    #[must_use]
    pub fn new(plan: &'a Plan, summary: &'a Summary, boxes: bool) -> Self {
        let pools = plan.needs.pools.iter().map(|pool| Inference {
            pool: &pool.name,
            replicas: pool.replicas.len() as u64,
            replica_names: &pool.replicas,
            ranks_per_replica: pool.ranks.len() as u64,
            layout: None,
        });
        Self {
            schema: SCHEMA,
            digest: &summary.digest,
            training: Training { ranks: plan.loads.len(), layout: None },
            inference: pools.collect(),
            bytes: &summary.bytes,
            routes: Routes(plan, summary),
            boxes: boxes.then_some(Boxes(plan)),
        }
    }

    /// With what the sides' layouts were made from, the pools in their order: the plan itself does not know.
    #[must_use]
    pub fn with_layouts(mut self, training: Value, pools: impl IntoIterator<Item = Value>) -> Self {
        self.training.layout = Some(training);
        self.inference.iter_mut().zip(pools).for_each(|(pool, layout)| pool.layout = Some(layout));
        self
    }
}

impl Serialize for Routes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(plan, summary) = self;
        let endpoint = |endpoint| match endpoint {
            Endpoint::Training { rank } => EndpointEntry::Training { rank: rank.0 },
            Endpoint::Inference { pool, replica, rank } => EndpointEntry::Inference {
                pool: &plan.needs.pools[pool as usize].name,
                replica,
                rank: rank.0,
            },
        };
        serializer.collect_seq(summary.routes.iter().map(|route| RouteEntry {
            source: endpoint(route.source),
            destination: endpoint(route.destination),
            stage: 0,
            kind: "send",
            bytes: route.bytes,
            boxes: route.boxes,
        }))
    }
}

impl Serialize for Boxes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(plan) = self;
        let mut seq = serializer.serialize_seq(None)?;
        for (route, pair) in plan.pairs.iter().enumerate() {
            let moves = plan.expand(pair);
            for moved in &moves.boxes {
                seq.serialize_element(&box_entry(plan, route, moved))?;
            }
        }
        seq.end()
    }
}

fn box_entry<'a>(plan: &'a Plan, route: usize, moved: &'a MoveBox) -> BoxEntry<'a> {
    let sources = &plan.needs.sources;
    let pair = &plan.pairs[route];
    let from = &sources.locals[pair.source.0 as usize][moved.source.0 as usize];
    let to = &plan.needs.needs(pair.destination).locals[moved.destination.0 as usize];
    let place =
        |name: u32, start: &'a Dims| PlaceEntry { tensor: sources.names.get(name), start: start.as_slice() };
    BoxEntry {
        route,
        tensor: &sources.tensors[moved.tensor.0 as usize].name,
        dtype: to.dtype.name(),
        shape: moved.shape.as_slice(),
        hf: moved.hf.as_slice(),
        source: place(from.name, &moved.source_start),
        destination: place(to.name, &moved.destination_start),
        permute: moved.permute.as_ref().map(|permute| &permute[..moved.hf.as_slice().len()]),
    }
}
