//! The two sides of a refit, evaluated: what each of their ranks holds, and what is planned and digested of it.

use super::PlannedError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weightrefit_core::digest::{Classes, ColumnKeys, Ledger};
use weightrefit_core::id::{Sha256, TensorId};
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::membership::{Membership, Seat};
use weightrefit_core::model::TensorTable;
use weightrefit_core::plan::{Plan, Planner, Sources};
use weightrefit_core::region::RankRegions;
use weightrefit_proto::refit::Refit;

/// The ranks of one side or pool.
pub(super) struct Side {
    pub(super) name: String,
    pub(super) layout: Sha256,
    pub(super) alias: BTreeMap<String, String>,
    /// The same by ids, for tensors of the table.
    pub(super) carriers: BTreeMap<TensorId, TensorId>,
    pub(super) ranks: Vec<RankRegions>,
    pub(super) classes: Option<Arc<Classes>>,
}

impl Side {
    /// `expected` ranks are in the membership; `None` where it has none of this side, and any number will do.
    fn new(
        name: String,
        value: &serde_json::Value,
        table: &TensorTable,
        expected: Option<usize>,
    ) -> Result<Self, PlannedError> {
        let failed = |source| PlannedError::Layout { side: name.clone(), source: Box::new(source) };
        let document = Document::from_value(value).map_err(failed)?;
        let layout = Layout::new(&document, table).map_err(failed)?;
        let found = layout.world() as usize;
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            return Err(PlannedError::Disagree { what: name, unit: "ranks", found, expected });
        }
        let mut ranks = Vec::with_capacity(found);
        for rank in layout.ranks() {
            ranks.push(layout.rank_regions(rank).map_err(failed)?);
        }
        let carriers = table.iter().map(|(id, _)| (id, layout.alias(id)));
        let carriers = carriers.filter(|(id, carrier)| id != carrier).collect();
        Ok(Self { name, layout: layout.digest(), alias: document.alias, carriers, ranks, classes: None })
    }
}

pub(super) fn sides(
    membership: &Membership,
    refit: &Refit,
    table: &TensorTable,
) -> Result<(Side, Vec<Side>), PlannedError> {
    let names = refit.pools.iter().map(|pool| &pool.name);
    if !names.eq(membership.pools()) {
        let (found, expected) = (refit.pools.len(), membership.pools().len());
        return Err(PlannedError::Disagree { what: "the refit".to_owned(), unit: "pools", found, expected });
    }
    // Without a trainer the layout still says what its ranks would hold; nobody of it is a member.
    let ranks = Some(membership.training().len()).filter(|ranks| *ranks > 0);
    let training = Side::new("training".to_owned(), &refit.training, table, ranks)?;
    let replicas = membership.replicas();
    let mut pools = Vec::with_capacity(refit.pools.len());
    for (index, pool) in (0..).zip(&refit.pools) {
        let first = replicas.iter().find(|replica| replica.pool == index);
        let ranks = first.map(|replica| replica.ranks.len());
        pools.push(Side::new(format!("pool `{}`", pool.name), &pool.layout, table, ranks)?);
    }
    Ok((training, pools))
}

pub(super) fn side_of<'s>(seat: &Seat, training: &'s Side, pools: &'s [Side]) -> &'s Side {
    match seat {
        Seat::Training { .. } => training,
        Seat::Inference { pool, .. } => {
            let name = format!("pool `{pool}`");
            // The membership's pools are those of the refit, and its seats name only them.
            pools.iter().find(|side| side.name == name).expect("a seat names a pool of the refit")
        }
    }
}

pub(super) fn plan(
    table: &TensorTable,
    training: &Side,
    pools: &[Side],
    membership: &Membership,
) -> Result<Plan, PlannedError> {
    let tensors = table.iter().map(|(_, tensor)| (tensor.name.as_str(), tensor.shape.as_slice()));
    let mut sources = Sources::new(tensors, &training.alias, training.layout)?;
    for regions in &training.ranks {
        sources.add_rank(regions)?;
    }
    let mut planner = Planner::new(sources);
    let replicas = membership.replicas();
    for (index, pool) in (0..).zip(pools) {
        let of_pool = replicas.iter().filter(|replica| replica.pool == index);
        let names = of_pool.map(|replica| replica.name.clone()).collect();
        let name = membership.pools().get(index as usize).map_or("", String::as_str);
        planner.add_pool(name, names, pool.layout)?;
        for regions in &pool.ranks {
            planner.add_rank(regions)?;
        }
    }
    Ok(planner.plan()?)
}

/// Makes the classes of all sides, and what compares them.
pub(super) fn verification(
    membership: &Membership,
    table: &TensorTable,
    training: &mut Side,
    pools: &mut [Side],
) -> Result<(Ledger, ColumnKeys), PlannedError> {
    let mut wanted = BTreeSet::new();
    let mut of_pools = Vec::with_capacity(pools.len());
    for (pool, name) in pools.iter_mut().zip(membership.pools()) {
        let ranks: Vec<_> = pool.ranks.iter().collect();
        let classes = Classes::of_pool(name, table, &ranks)?;
        wanted.extend(classes.tensors().iter().copied());
        of_pools.push(classes.clone());
        pool.classes = Some(Arc::new(classes));
    }
    let ranks: Vec<_> = training.ranks.iter().collect();
    let classes = Classes::of_training(table, &training.carriers, &ranks, &wanted)?;
    training.classes = Some(Arc::new(classes.clone()));
    let words = wanted.iter().map(|&(tensor, dtype)| {
        let columns = table[tensor].shape.last().copied().unwrap_or(1);
        columns.saturating_mul(dtype.size().div_ceil(2))
    });
    let keys = ColumnKeys::new(words.max().unwrap_or(0));
    Ok((Ledger::new(membership, classes, of_pools), keys))
}
