//! Digests of made-up content: the content of a rank is one number, and its digest is that number.

use std::collections::BTreeMap;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{ContentSum, MemberId, TensorId};
use weightrefit_core::round::message::ClassSums;
use weightrefit_core::round::topology::{DigestFault, DigestLedger, PublishedSums};

/// What a step of a trainer start holds.
pub(crate) fn content(world: &str, step: i64) -> u64 {
    let world: u64 = world.bytes().fold(0, |sum, byte| sum * 31 + u64::from(byte));
    (world << 20) + u64::try_from(step).expect("steps of tests are positive")
}

pub(crate) fn sum(content: u64) -> ContentSum {
    ContentSum(u128::from(content).to_le_bytes())
}

pub(crate) fn sums(content: u64) -> ClassSums {
    vec![(0, sum(content))].into()
}

#[derive(Debug)]
pub(crate) struct SumLedger;

impl DigestLedger for SumLedger {
    fn published(&self, sums: &BTreeMap<MemberId, ClassSums>) -> Result<PublishedSums, DigestFault> {
        let mut all = sums.iter();
        let first = all.next().and_then(|(_, sums)| sums.first()).map(|(_, sum)| *sum).unwrap_or_default();
        let differs = all.find(|(_, sums)| sums.first().map(|(_, sum)| *sum) != Some(first));
        match differs {
            Some((member, _)) => {
                Err(DigestFault { code: Code::ReplicaDivergence, tensor: None, member: Some(*member) })
            }
            None => Ok(BTreeMap::from([((TensorId(0), DType::Bf16), first)])),
        }
    }

    fn landed(
        &self,
        _replica: u32,
        sums: &BTreeMap<MemberId, ClassSums>,
        published: &PublishedSums,
    ) -> Result<ContentSum, DigestFault> {
        let want = published.values().next().copied().unwrap_or_default();
        match sums.iter().find(|(_, sums)| sums.first().map(|(_, sum)| *sum) != Some(want)) {
            Some((member, _)) => {
                let (tensor, member) = (Some(TensorId(0)), Some(*member));
                Err(DigestFault { code: Code::DigestMismatch, tensor, member })
            }
            None => Ok(want),
        }
    }
}
