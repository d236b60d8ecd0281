//! Random small documents against a reference that moves single elements.

use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use weightrefit_core::id::Rank;
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::model::{TensorTable, read_list};

/// Element of a local tensor (lead first, if any) to (tensor, element of it).
type Elements = BTreeMap<Vec<u64>, (usize, Vec<u64>)>;

/// Shape and elements of the one local tensor of a rank; `None` where the document cannot be evaluated there.
type Local = Option<(Vec<u64>, Elements)>;

#[derive(Debug, Clone)]
struct Cut {
    dim: usize,
    /// 0 is `a`, 1 is `b`.
    axis: usize,
    kind: usize,
    unit: usize,
    spread: bool,
}

#[derive(Debug, Clone)]
struct Case {
    /// Sizes of `a` (fastest) and `b`.
    sizes: [usize; 2],
    /// Rows of each packed tensor, in order of slots.
    rows: Vec<usize>,
    columns: usize,
    /// Rows per stripe of each slot; absent: stacked.
    stripes: Option<Vec<usize>>,
    cuts: Vec<Cut>,
    pad: Option<(usize, usize)>,
    grain: Option<(usize, usize)>,
}

const AXES: [&str; 2] = ["a", "b"];
const KINDS: [&str; 3] = ["even", "chunk", "balanced"];

fn cut() -> impl Strategy<Value = Cut> {
    (0..2_usize, 0..2_usize, 0..3_usize, 1..4_usize, any::<bool>()).prop_map(
        |(dim, axis, kind, unit, spread)| Cut {
            dim,
            axis,
            kind,
            unit: if kind == 2 { 1 } else { unit },
            spread: spread && kind == 0,
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (1..4_usize, 1..4_usize);
    let shapes = (prop::collection::vec(0..9_usize, 1..4), 0..7_usize);
    let round = || prop::option::weighted(0.3, (0..2_usize, 1..5_usize));
    let stripes = prop::option::weighted(0.4, prop::collection::vec(1..4_usize, 3));
    (sizes, shapes, stripes, 0..5_usize, prop::collection::vec(cut(), 0..3), round(), round()).prop_map(
        |((a, b), (mut rows, columns), stripes, groups, mut cuts, mut pad, mut grain)| {
            if let Some(stripes) = &stripes {
                rows.iter_mut().zip(stripes).for_each(|(rows, stripe)| *rows = groups * stripe);
                cuts.iter_mut().for_each(|cut| cut.dim = 0);
                (pad, grain) = (None, None);
            }
            Case { sizes: [a, b], rows, columns, stripes, cuts, pad, grain }
        },
    )
}

impl Case {
    fn document(&self) -> Document {
        let cuts: Vec<Value> = self.cuts.iter().map(|cut| {
            json!({"dim": cut.dim, "by": AXES[cut.axis], "kind": KINDS[cut.kind], "unit": cut.unit, "spread": cut.spread})
        }).collect();
        let rules: Vec<Value> = (0..self.rows.len())
            .map(|slot| {
                let mut rule =
                    json!({"hf": format!("t{slot}"), "to": "x", "cut": cuts, "pack": {"slot": slot}});
                if let Some(stripes) = &self.stripes {
                    rule["pack"]["stripe"] = json!(stripes[slot]);
                }
                for (key, given) in [("pad", self.pad), ("grain", self.grain)] {
                    if let Some((dim, to)) = given {
                        rule[key] = json!({"dim": dim, "to": to});
                    }
                }
                rule
            })
            .collect();
        let [a, b] = self.sizes;
        let document = json!({
            "layout": "v1", "world": a * b, "sizes": {"a": a, "b": b}, "grids": {"g": ["a", "b"]},
            "axes": {"none": []}, "stages": {"axis": "none", "layers": [[0, 1]]}, "rules": rules,
        });
        Document::from_value(&document).unwrap()
    }

    fn table(&self) -> TensorTable {
        let tensor =
            |(slot, rows)| json!({"name": format!("t{slot}"), "shape": [rows, self.columns], "dtype": "u8"});
        let tensors: Vec<Value> = self.rows.iter().enumerate().map(tensor).collect();
        read_list(&json!({"tensors": tensors}).to_string()).unwrap()
    }

    /// What the rank holds, element by element.
    fn naive(&self, rank: usize) -> Local {
        let [a, b] = self.sizes;
        let coordinates = [(rank % a, a), (rank / a % b, b)];
        let mut rows: Vec<Option<(usize, u64)>> = Vec::new();
        let mut columns: Vec<Vec<Option<u64>>> = Vec::new();
        if let Some(stripes) = &self.stripes {
            let groups = self.rows[0] / stripes[0];
            for group in 0..groups {
                for (slot, height) in stripes.iter().enumerate().take(self.rows.len()) {
                    let stripe = (0..*height).map(|row| (group * height + row) as u64);
                    rows.extend(stripe.map(|row| Some((slot, row))));
                }
            }
            for cut in &self.cuts {
                rows = slice(&rows, cut, coordinates[cut.axis])?;
            }
            columns = vec![(0..self.columns as u64).map(Some).collect(); self.rows.len()];
        } else {
            for (slot, count) in self.rows.iter().enumerate() {
                let mut dims = [*count, self.columns].map(|n| (0..n as u64).map(Some).collect::<Vec<_>>());
                round_up(&mut dims, self.pad);
                for cut in &self.cuts {
                    dims[cut.dim] = slice(&dims[cut.dim], cut, coordinates[cut.axis])?;
                }
                round_up(&mut dims, self.grain);
                let [slot_rows, slot_columns] = dims;
                rows.extend(slot_rows.into_iter().map(|row| row.map(|row| (slot, row))));
                columns.push(slot_columns);
            }
        }
        let mut elements = Elements::new();
        for (i, row) in rows.iter().enumerate() {
            let Some((slot, row)) = row else { continue };
            for (j, column) in columns[*slot].iter().enumerate() {
                if let Some(column) = column {
                    elements.insert(vec![i as u64, j as u64], (*slot, vec![*row, *column]));
                }
            }
        }
        Some((vec![rows.len() as u64, columns[0].len() as u64], elements))
    }
}

fn round_up(dims: &mut [Vec<Option<u64>>; 2], to: Option<(usize, usize)>) {
    if let Some((dim, to)) = to {
        while !dims[dim].len().is_multiple_of(to) {
            dims[dim].push(None);
        }
    }
}

/// The part of a list that coordinate `index` of `parts` gets.
fn slice<T: Clone>(list: &[T], cut: &Cut, (index, parts): (usize, usize)) -> Option<Vec<T>> {
    let units: Vec<&[T]> = list.chunks(cut.unit).collect();
    let mine: Vec<&[T]> = match KINDS[cut.kind] {
        "chunk" => {
            let size = units.len().div_ceil(parts).max(1);
            units.chunks(size).nth(index).unwrap_or_default().to_vec()
        }
        "balanced" => {
            let mut dealt = vec![0; parts];
            (0..units.len()).for_each(|unit| dealt[unit % parts] += 1);
            let before: usize = dealt[..index].iter().sum();
            units[before..before + dealt[index]].to_vec()
        }
        _ if !list.len().is_multiple_of(cut.unit) => return None,
        _ if cut.spread && units.len() < parts && !units.is_empty() => {
            if !parts.is_multiple_of(units.len()) {
                return None;
            }
            vec![units[index * units.len() / parts]]
        }
        _ if !units.len().is_multiple_of(parts) => return None,
        _ => {
            let each = units.len() / parts;
            units[index * each..(index + 1) * each].to_vec()
        }
    };
    Some(mine.concat())
}

/// The same from the layout. A local element that two pieces claim fails the test.
fn evaluated(layout: &Layout, rank: u32) -> Local {
    let rank = layout.rank(Rank(rank)).ok()?;
    let [local] = &rank.regions.locals[..] else { return Some((Vec::new(), Elements::new())) };
    let mut elements = Elements::new();
    for piece in &rank.regions.pieces {
        let mut partial = vec![(piece.lead.into_iter().collect::<Vec<_>>(), Vec::new())];
        for runs in &piece.dims {
            let positions = runs.iter().flat_map(|run| (0..run.len).map(|i| (run.local + i, run.hf + i)));
            let positions: Vec<_> = positions.collect();
            let extend = |(local, hf): (Vec<u64>, Vec<u64>)| {
                let add =
                    |list: &Vec<u64>, value: u64| list.iter().copied().chain([value]).collect::<Vec<_>>();
                positions.iter().map(move |(l, h)| (add(&local, *l), add(&hf, *h))).collect::<Vec<_>>()
            };
            partial = partial.into_iter().flat_map(extend).collect();
        }
        for (local, hf) in partial {
            let twice = elements.insert(local, (piece.tensor.0 as usize, hf));
            assert_eq!(twice, None, "a local element is claimed twice");
        }
    }
    assert_eq!(rank.pads[0], local.shape.iter().product::<u64>() - elements.len() as u64);
    Some((local.shape.clone(), elements))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn packed_tensors_lie_where_single_elements_would_be_put(case in case()) {
        let layout = Layout::new(&case.document(), &case.table()).unwrap();
        for rank in 0..layout.world() {
            prop_assert_eq!(evaluated(&layout, rank), case.naive(rank as usize), "rank {}", rank);
        }
    }

    #[test]
    fn a_layout_passes_its_check_exactly_if_every_element_is_held_once_or_equally(case in case()) {
        let layout = Layout::new(&case.document(), &case.table()).unwrap();
        let ranks: Vec<_> = (0..layout.world()).map(|rank| case.naive(rank as usize)).collect();
        let Some(ranks) = ranks.into_iter().collect::<Option<Vec<_>>>() else {
            prop_assert!(layout.check().is_err());
            return Ok(());
        };
        // Per tensor the distinct sets of elements that ranks hold.
        let mut sets: BTreeMap<usize, Vec<Vec<Vec<u64>>>> = (0..case.rows.len()).map(|slot| (slot, Vec::new())).collect();
        for (_, elements) in &ranks {
            for (slot, sets) in &mut sets {
                let mut set: Vec<_> = elements.values().filter(|(t, _)| t == slot).map(|(_, hf)| hf.clone()).collect();
                set.sort();
                if !set.is_empty() && !sets.contains(&set) {
                    sets.push(set);
                }
            }
        }
        let once = sets.iter().all(|(slot, sets)| {
            let mut all = sets.concat();
            let held = all.len();
            all.sort();
            all.dedup();
            held == all.len() && held == case.rows[*slot] * case.columns
        });
        prop_assert_eq!(layout.check().is_ok(), once);
    }

    #[test]
    fn stacked_experts_lie_on_their_owners(count in 1_usize..10, parts in 1_usize..5, kind in 0_usize..4) {
        let words = ["even", "chunk", "balanced", "round_robin"];
        let document = json!({
            "layout": "v1", "world": parts, "grids": {"g": ["a"]}, "axes": {"none": []},
            "stages": {"axis": "none", "layers": [[0, 1]]},
            "rules": [{"hf": r"t(?P<e>\d+)", "to": "x", "expert": {"by": "a", "of": count, "kind": words[kind], "stack": true}}],
        });
        let tensors: Vec<Value> = (0..count).map(|e| json!({"name": format!("t{e}"), "shape": [1], "dtype": "u8"})).collect();
        let table = read_list(&json!({"tensors": tensors}).to_string()).unwrap();
        let layout = Layout::new(&Document::from_value(&document).unwrap(), &table);
        if kind == 0 && !count.is_multiple_of(parts) {
            prop_assert!(layout.is_err());
            return Ok(());
        }
        let layout = layout.unwrap();
        prop_assert!(layout.check().is_ok());
        let all: Vec<usize> = (0..count).collect();
        for rank in 0..parts {
            let owned: Vec<usize> = if kind == 3 {
                all.iter().copied().filter(|e| e % parts == rank).collect()
            } else {
                slice(&all, &Cut { dim: 0, axis: 0, kind, unit: 1, spread: false }, (rank, parts)).unwrap()
            };
            let place = |(local, e): (usize, &usize)| (vec![local as u64, 0], (*e, vec![0]));
            let want: Elements = owned.iter().enumerate().map(place).collect();
            let (shape, elements) = evaluated(&layout, rank as u32).unwrap();
            prop_assert_eq!(elements, want);
            prop_assert_eq!(shape, if owned.is_empty() { Vec::new() } else { vec![owned.len() as u64, 1] });
        }
    }
}
