//! What the leader does with reported sums: copies compared, classes added up once, versions named.

use super::classes::Classes;
use crate::code::Code;
use crate::dtype::DType;
use crate::id::{ContentSum, MemberId, Rank, TensorId};
use crate::membership::Membership;
use crate::round::message::ClassSums;
use crate::round::topology::{DigestFault, DigestLedger, PublishedSums};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Checks reports against the classes that one membership's layouts give.
#[derive(Debug)]
pub struct Ledger {
    training: Classes,
    pools: Vec<Classes>,
    trainers: Vec<MemberId>,
    /// By replica: its pool, and its ranks.
    replicas: Vec<(u32, Vec<MemberId>)>,
}

/// The ledger of `verification: Disabled`: nobody reports, and every version has sum zero.
#[derive(Debug)]
pub struct Unverified;

impl Ledger {
    /// `pools` in the membership's order.
    #[must_use]
    pub fn new(membership: &Membership, training: Classes, pools: Vec<Classes>) -> Self {
        let replicas =
            membership.replicas().into_iter().map(|replica| (replica.pool, replica.ranks)).collect();
        Self { training, pools, trainers: membership.training(), replicas }
    }
}

impl DigestLedger for Ledger {
    fn published(&self, sums: &BTreeMap<MemberId, ClassSums>) -> Result<PublishedSums, DigestFault> {
        add_up(&self.training, &self.trainers, sums, Code::ReplicaDivergence)
    }

    fn landed(
        &self,
        replica: u32,
        sums: &BTreeMap<MemberId, ClassSums>,
        published: &PublishedSums,
    ) -> Result<ContentSum, DigestFault> {
        let fault = |tensor, member| DigestFault { code: Code::DigestMismatch, tensor, member };
        let found = self.replicas.get(replica as usize);
        let pool = found.and_then(|(pool, ranks)| Some((self.pools.get(*pool as usize)?, ranks)));
        let (classes, ranks) = pool.ok_or_else(|| fault(None, None))?;
        let landed = add_up(classes, ranks, sums, Code::DigestMismatch)?;
        if let Some((&(tensor, dtype), _)) = landed.iter().find(|(key, sum)| published.get(key) != Some(sum))
        {
            return Err(fault(Some(tensor), only_holder(classes, ranks, (tensor, dtype))));
        }
        Ok(version_sum(&landed))
    }
}

impl DigestLedger for Unverified {
    fn published(&self, _: &BTreeMap<MemberId, ClassSums>) -> Result<PublishedSums, DigestFault> {
        Ok(PublishedSums::new())
    }

    fn landed(
        &self,
        _: u32,
        _: &BTreeMap<MemberId, ClassSums>,
        _: &PublishedSums,
    ) -> Result<ContentSum, DigestFault> {
        Ok(ContentSum::default())
    }
}

/// Names a version of a pool: over its digested tensors in table order, their dtypes and digests.
#[must_use]
pub fn version_sum(sums: &PublishedSums) -> ContentSum {
    let mut hasher = Sha256::new();
    for ((tensor, dtype), sum) in sums {
        hasher.update(u64::from(tensor.0).to_le_bytes());
        hasher.update(dtype.name());
        hasher.update([0]);
        hasher.update(sum.0);
    }
    let mut out = ContentSum::default();
    out.0.copy_from_slice(&hasher.finalize()[..16]);
    out
}

/// All holders of a class must report one sum, which is counted once.
fn add_up(
    classes: &Classes,
    members: &[MemberId],
    sums: &BTreeMap<MemberId, ClassSums>,
    code: Code,
) -> Result<PublishedSums, DigestFault> {
    let mut by_class: Vec<Option<ContentSum>> = vec![None; classes.classes.len()];
    for rank in 0..classes.ranks() {
        let member = members.get(rank).copied();
        let fault = |tensor| DigestFault { code, tensor, member };
        let report = member.and_then(|member| sums.get(&member)).ok_or_else(|| fault(None))?;
        let parts = classes.parts(Rank(rank as u32));
        if report.len() != parts.len() {
            return Err(fault(None));
        }
        for (part, (class, sum)) in parts.iter().zip(report.iter()) {
            let known = &mut by_class[part.class as usize];
            if *class != part.class || *known.get_or_insert(*sum) != *sum {
                return Err(fault(Some(part.tensor)));
            }
        }
    }
    let mut out: PublishedSums = classes.tensors.iter().map(|key| (*key, ContentSum::default())).collect();
    for (key, sum) in classes.classes.iter().zip(by_class) {
        let total = out.entry(*key).or_default();
        *total = total.plus(sum.unwrap_or_default());
    }
    Ok(out)
}

/// The rank to blame for a tensor, where one rank holds all of it.
fn only_holder(classes: &Classes, members: &[MemberId], key: (TensorId, DType)) -> Option<MemberId> {
    let holds =
        |rank: &usize| classes.parts(Rank(*rank as u32)).iter().any(|part| (part.tensor, part.dtype) == key);
    let mut holders = (0..classes.ranks()).filter(holds);
    let first = holders.next()?;
    if holders.next().is_some() { None } else { members.get(first).copied() }
}

#[cfg(test)]
mod tests;
