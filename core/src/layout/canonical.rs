//! The canonical form of a document: prefixes and suffix expanded, expressions evaluated, defaults written out,
//! keys in order. It is itself a document that means the same, and what its digest names is what agents follow.

use super::bind::Layout;
use super::document::At;
use super::evaluate::RankLayout;
use super::recording;
use super::resolve::{Holds, Side, SideRoundUp, SideRule};
use crate::id::Sha256;
use serde_json::{Map, Value, json};
use sha2::Digest;
use std::collections::{BTreeMap, BTreeSet};

impl Layout {
    /// The canonical document as JSON without spaces.
    #[must_use]
    pub fn canonical(&self) -> String {
        let mut value = match &self.recorded {
            None => document(&self.side),
            Some(ranks) => {
                let recorded = |rank: &RankLayout| recording::record(&rank.regions, &self.table);
                let ranks: Vec<_> = ranks.iter().map(recorded).collect();
                json!({"layout": "v1", "alias": self.side.alias, "ranks": ranks})
            }
        };
        value.sort_all_objects();
        value.to_string()
    }

    /// SHA-256 of [`Self::canonical`].
    #[must_use]
    pub fn digest(&self) -> Sha256 {
        Sha256(sha2::Sha256::digest(self.canonical()).into())
    }
}

fn document(side: &Side) -> Value {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| out.insert(key.to_owned(), value);
    put("layout", json!("v1"));
    put("world", json!(side.grids.world));
    put("sizes", json!(sizes(side)));
    let names = |axes: &[(String, u64)]| axes.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let grids: BTreeMap<_, _> = side.grids.grids.iter().map(|grid| (&grid.name, names(&grid.axes))).collect();
    put("grids", json!(grids));
    put("axes", json!(side.grids.composites));
    put("stages", json!({"axis": side.stages.axis, "layers": side.stages.layers}));
    put("alias", json!(side.alias));
    put("ignore", side.ignore.iter().map(|pattern| json!(pattern.text)).collect());
    if let Some(dtype) = side.dtype {
        put("dtype", json!(dtype));
    }
    put("rules", side.rules.iter().map(|r| rule(side, r)).collect());
    Value::Object(out)
}

/// An axis that two grids infer to different sizes stays without one, so that both infer it again.
fn sizes(side: &Side) -> BTreeMap<&str, u64> {
    let mut sizes = BTreeMap::<&str, BTreeSet<u64>>::new();
    for (name, size) in side.grids.grids.iter().flat_map(|grid| &grid.axes) {
        sizes.entry(name).or_default().insert(*size);
    }
    let single = |sizes: &BTreeSet<u64>| sizes.first().copied().filter(|_| sizes.len() == 1);
    sizes.iter().filter_map(|(name, sizes)| Some((*name, single(sizes)?))).collect()
}

fn rule(side: &Side, rule: &SideRule) -> Value {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| out.insert(key.to_owned(), value);
    put("hf", json!(rule.pattern.text));
    put("to", json!(rule.to.text));
    put("grid", json!(side.grids.grids[rule.grid].name));
    if let Holds::At(At { first, last, all }) = rule.holds {
        let words = [(first, "first"), (last, "last"), (all, "all")];
        put("at", words.into_iter().filter(|(on, _)| *on).map(|(_, word)| json!(word)).collect());
    }
    if let Some(only) = &rule.only {
        put("only", json!(only.text()));
    }
    let cuts = rule.cuts.iter().map(|cut| {
        let (by, kind) = (&cut.axis.name, cut.kind.word());
        json!({"dim": cut.dim, "by": by, "kind": kind, "unit": cut.unit, "spread": cut.spread})
    });
    put("cut", cuts.collect());
    if let Some(pack) = rule.pack {
        let mut value = json!({"slot": pack.slot, "dim": pack.dim});
        if let Some(stripe) = pack.stripe {
            value["stripe"] = json!(stripe);
        }
        put("pack", value);
    }
    if let Some(expert) = &rule.expert {
        let (by, kind) = (&expert.axis.name, expert.kind.word());
        put("expert", json!({"by": by, "of": expert.of, "kind": kind, "stack": expert.stack}));
    }
    let round_up = |round_up: SideRoundUp| json!({"dim": round_up.dim, "to": round_up.to});
    for (key, given) in [("pad", rule.pad), ("grain", rule.grain)] {
        if let Some(given) = given {
            put(key, round_up(given));
        }
    }
    if let Some(dtype) = rule.dtype {
        put("dtype", json!(dtype));
    }
    if let Some(post) = &rule.post {
        put("post", json!(post));
    }
    Value::Object(out)
}
