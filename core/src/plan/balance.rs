//! How much of each set of holders' load each of them carries, so that the busiest source carries little.
//!
//! Every set's load goes to the least loaded of its ranks first, smallest sets first; then each set is dealt
//! out again, given all others, until nothing moves. Each turn lowers the sum of squared loads, whose minimum
//! also has the lowest maximum, and where sets nest (the rule in data-parallel layouts) the first turn is
//! already there. The bound needs no trust in this: any set of ranks must carry, on average, what only its
//! members hold.

/// Turns after the first: sets that overlap without nesting converge fast, and the bound shows what is left.
const TURNS_MAX: usize = 16;

/// Per set of holders, the bytes that each of its ranks carries; in order of the set's ranks.
pub(super) fn quotas(sets: &[(&[u32], u64)], ranks: usize) -> Vec<Vec<u64>> {
    let mut loads = vec![0_u64; ranks];
    let mut quotas: Vec<Vec<u64>> = sets.iter().map(|(set, _)| vec![0; set.len()]).collect();
    // By content, so that the numbering of sets does not matter.
    let mut order: Vec<usize> = (0..sets.len()).collect();
    order.sort_by_key(|&at| (sets[at].0.len(), sets[at].0));
    for turn in 0..=TURNS_MAX {
        let mut moved = false;
        for &at in &order {
            let (set, bytes) = sets[at];
            if set.len() == 1 && turn > 0 {
                continue;
            }
            for (&rank, quota) in set.iter().zip(&quotas[at]) {
                loads[rank as usize] -= quota;
            }
            let dealt = deal(set, bytes, &loads);
            for (&rank, quota) in set.iter().zip(&dealt) {
                loads[rank as usize] += quota;
            }
            moved |= dealt != quotas[at];
            quotas[at] = dealt;
        }
        if !moved {
            break;
        }
    }
    quotas
}

/// Deals `bytes` so that the lowest of the set's ranks are filled up to one common level.
fn deal(set: &[u32], bytes: u64, loads: &[u64]) -> Vec<u64> {
    let mut low: Vec<u64> = set.iter().map(|&rank| loads[rank as usize]).collect();
    low.sort_unstable();
    // The level over the `k` lowest ranks is (bytes + their loads) / k; it holds once it is not above the next.
    let (mut sum, mut level, mut extra) = (0, 0, 0);
    for (k, load) in (1..).zip(&low) {
        sum += load;
        level = (bytes + sum) / k;
        extra = (bytes + sum) % k;
        if low.get(k as usize).is_none_or(|next| level < *next) {
            break;
        }
    }
    // What does not divide goes byte by byte to the first ranks below the level.
    let mut quota = |load: u64| {
        if load > level {
            return 0;
        }
        let one = u64::from(extra > 0);
        extra -= one;
        level - load + one
    };
    set.iter().map(|&rank| quota(loads[rank as usize])).collect()
}

/// A load that some source must carry whatever the plan: what one rank alone holds, or, over ranks in order of
/// falling load, the average of what only the first `k` hold.
pub(super) fn bound(sets: &[(&[u32], u64)], loads: &[u64]) -> u64 {
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&rank| std::cmp::Reverse(loads[rank]));
    let mut place = vec![0; loads.len()];
    for (at, &rank) in order.iter().enumerate() {
        place[rank] = at;
    }
    let mut only_first = vec![0_u64; loads.len()];
    for (set, bytes) in sets {
        if let Some(last) = set.iter().map(|&rank| place[rank as usize]).max() {
            only_first[last] += bytes;
        }
    }
    let alone = sets.iter().filter(|(set, _)| set.len() == 1).map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let mut forced = 0;
    (1..).zip(only_first).fold(alone, |most: u64, (k, bytes)| {
        forced += bytes;
        most.max(u64::div_ceil(forced, k))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(sets: &[(&[u32], u64)], ranks: usize) -> Vec<u64> {
        let mut loads = vec![0; ranks];
        for ((set, bytes), quotas) in sets.iter().zip(quotas(sets, ranks)) {
            assert_eq!(quotas.iter().sum::<u64>(), *bytes);
            for (&rank, quota) in set.iter().zip(quotas) {
                loads[rank as usize] += quota;
            }
        }
        loads
    }

    #[test]
    fn nested_sets_level_out() {
        let sets: [(&[u32], u64); 3] = [(&[0, 1, 2, 3], 10), (&[0, 1], 6), (&[0], 5)];
        let loads = loads(&sets, 4);
        assert_eq!(loads, [6, 5, 5, 5]);
        assert_eq!(bound(&sets, &loads), 6);
    }

    #[test]
    fn what_one_rank_alone_holds_bounds_the_busiest() {
        let sets: [(&[u32], u64); 2] = [(&[1], 100), (&[0, 1, 2], 8)];
        let loads = loads(&sets, 3);
        assert_eq!(loads, [4, 100, 4]);
        assert_eq!(bound(&sets, &loads), 100);
    }

    #[test]
    fn sets_that_overlap_without_nesting_are_dealt_again_until_level() {
        let sets: [(&[u32], u64); 3] = [(&[0, 1], 90), (&[1, 2], 90), (&[2, 3], 0)];
        let loads = loads(&sets, 4);
        assert_eq!(loads[..3], [60, 60, 60]);
        assert_eq!(bound(&sets, &loads), 60);
    }

    #[test]
    fn the_bound_is_never_above_the_busiest() {
        let sets: [(&[u32], u64); 2] = [(&[0, 1, 2], 7), (&[], 0)];
        assert_eq!(bound(&sets, &[3, 2, 2]), 3);
        assert_eq!(bound(&[], &[]), 0);
        let sets: [(&[u32], u64); 2] = [(&[0], 9), (&[1, 2], 10)];
        assert_eq!(bound(&sets, &[9, 10, 0]), 9);
    }
}
