//! Cutting overlapping regions of one tensor into disjoint classes.

use std::collections::BTreeMap;

/// Half-open range of positions of one dim.
pub(super) type Interval = (u64, u64);
/// Product over dims of sorted, disjoint intervals; none is empty.
pub(super) type Region = Vec<Vec<Interval>>;

/// Products that one tensor may be cut into: a grid of 128 × 128 cells, each with all its holders. Layouts of models
/// have a few.
const PRODUCTS_MAX: u64 = 1 << 14;

/// Elements that exactly these regions hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// Indices of the regions, ascending.
    pub(super) holders: Vec<usize>,
    /// Disjoint products; `None` where it is all of its only holder.
    pub(super) products: Option<Vec<Region>>,
}

/// The bound on products was met.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooMany {
    pub(super) limit: u64,
}

impl Class {
    /// Number of elements.
    pub(super) fn elements(&self, regions: &[Region]) -> u64 {
        match &self.products {
            None => self.holders.first().map_or(0, |holder| volume(&regions[*holder])),
            Some(products) => products.iter().map(volume).sum(),
        }
    }
}

/// Cuts distinct regions, sorted, into classes.
pub(super) fn classes(regions: &[Region]) -> Result<Vec<Class>, TooMany> {
    let all: Vec<&Region> = regions.iter().collect();
    if disjoint(&all, 0) {
        return Ok((0..regions.len()).map(|at| Class { holders: vec![at], products: None }).collect());
    }
    let dims = regions.first().map_or(0, Vec::len);
    let mut cut = Cut { regions, products: BTreeMap::new(), count: 0 };
    cut.descend(&(0..regions.len()).collect::<Vec<usize>>(), dims, &mut Vec::new())?;
    let whole = |holders: &[usize], products: &[Region]| matches!((holders, products), ([only], [product]) if *product == regions[*only]);
    Ok(cut
        .products
        .into_iter()
        .map(|(holders, products)| {
            let products = (!whole(&holders, &products)).then_some(products);
            Class { holders, products }
        })
        .collect())
}

/// True where no two of the regions, which are distinct and agree in all dims before `dim`, share an element.
///
/// Regions with equal intervals in `dim` go together; where the intervals of different groups do not meet, only
/// regions of one group can, in a later dim. This decides the cuts that layouts make in n log n.
fn disjoint(regions: &[&Region], dim: usize) -> bool {
    if regions.len() < 2 {
        return true;
    }
    if regions[0].len() <= dim {
        return false;
    }
    let mut groups: BTreeMap<&[Interval], Vec<&Region>> = BTreeMap::new();
    for region in regions {
        groups.entry(&region[dim]).or_default().push(region);
    }
    let mut intervals: Vec<Interval> = groups.keys().flat_map(|key| key.iter().copied()).collect();
    intervals.sort_unstable();
    if intervals.windows(2).all(|pair| pair[0].1 <= pair[1].0) {
        return groups.values().all(|group| disjoint(group, dim + 1));
    }
    let apart = |a: &Region, b: &Region| a.iter().zip(b).any(|(a, b)| !meet(a, b));
    regions.iter().enumerate().all(|(at, a)| regions[at + 1..].iter().all(|b| apart(a, b)))
}

/// True where two sorted lists share a position.
fn meet(mut a: &[Interval], mut b: &[Interval]) -> bool {
    while let ([first, rest @ ..], [other, others @ ..]) = (a, b) {
        if first.0 < other.1 && other.0 < first.1 {
            return true;
        }
        if first.1 <= other.0 { a = rest } else { b = others }
    }
    false
}

fn volume(region: &Region) -> u64 {
    region.iter().map(|intervals| intervals.iter().map(|(start, end)| end - start).sum::<u64>()).product()
}

/// Cuts dim by dim: positions of a dim that the same regions hold go together.
struct Cut<'r> {
    regions: &'r [Region],
    products: BTreeMap<Vec<usize>, Vec<Region>>,
    count: u64,
}

impl Cut<'_> {
    fn descend(&mut self, active: &[usize], dims: usize, prefix: &mut Region) -> Result<(), TooMany> {
        let dim = prefix.len();
        if dim == dims {
            self.count += 1;
            if self.count > PRODUCTS_MAX {
                return Err(TooMany { limit: PRODUCTS_MAX });
            }
            self.products.entry(active.to_vec()).or_default().push(prefix.clone());
            return Ok(());
        }
        for (holders, intervals) in self.segments(active, dim) {
            prefix.push(intervals);
            self.descend(&holders, dims, prefix)?;
            prefix.pop();
        }
        Ok(())
    }

    /// Positions of `dim` by who of `active` holds them, by a sweep over the borders.
    fn segments(&self, active: &[usize], dim: usize) -> BTreeMap<Vec<usize>, Vec<Interval>> {
        let mut borders: BTreeMap<u64, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        for &region in active {
            for &(start, end) in &self.regions[region][dim] {
                borders.entry(start).or_default().0.push(region);
                borders.entry(end).or_default().1.push(region);
            }
        }
        let mut out: BTreeMap<Vec<usize>, Vec<Interval>> = BTreeMap::new();
        let mut holders: Vec<usize> = Vec::new();
        let mut since = 0;
        for (at, (begin, end)) in borders {
            if !holders.is_empty() {
                out.entry(holders.clone()).or_default().push((since, at));
            }
            holders.retain(|holder| !end.contains(holder));
            holders.extend(begin);
            holders.sort_unstable();
            since = at;
        }
        out
    }
}
