//! DTensor placements give the regions that FSDP2 really stores.

use serde_json::Value;
use std::path::Path;
use weightrefit_core::id::Rank;
use weightrefit_core::layout::dtensor::{Mesh, Placed, Placement};

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

fn placement(value: &Value) -> Placement {
    let number = |i: usize| value[i].as_i64().unwrap();
    match value[0].as_str().unwrap() {
        "S" => Placement::Shard { dim: number(1) },
        "SS" => Placement::StridedShard { dim: number(1), split_factor: value[2].as_u64().unwrap() },
        "R" => Placement::Replicate,
        other => panic!("{other}"),
    }
}

fn mesh(vector: &Value) -> Mesh {
    // Nested lists are row-major already.
    fn flatten(value: &Value, out: &mut Vec<Rank>) {
        match value.as_array() {
            Some(list) => list.iter().for_each(|value| flatten(value, out)),
            None => out.push(Rank(u32::try_from(value.as_u64().unwrap()).unwrap())),
        }
    }
    let mut ranks = Vec::new();
    flatten(&vector["mesh_ranks"], &mut ranks);
    Mesh::new(numbers(&vector["mesh_shape"]), ranks).unwrap()
}

#[test]
fn every_stored_vector_holds_on_every_rank() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/dtensor/vectors.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let (mut placed, mut refused) = (0, 0);
    for vector in file["vectors"].as_array().unwrap() {
        let id = vector["id"].as_str().unwrap();
        let placements: Vec<_> = vector["placements"].as_array().unwrap().iter().map(placement).collect();
        let ranks = vector["ranks"].as_array().unwrap();
        let result = Placed::new(numbers(&vector["global_shape"]), mesh(vector), &placements);
        if ranks.iter().any(|rank| rank["shard_order_runs"].is_null()) {
            assert!(result.is_err(), "{id}");
            refused += 1;
            continue;
        }
        let result = result.unwrap_or_else(|error| panic!("{id}: {error}"));
        for rank in ranks {
            let number = Rank(u32::try_from(rank["rank"].as_u64().unwrap()).unwrap());
            let shard = result.shard(number).unwrap();
            let same = rank["shard_order_runs"] == "same";
            let want = &rank[if same { "runs" } else { "shard_order_runs" }];
            for (dim, want) in want.as_array().unwrap().iter().enumerate() {
                let got: Vec<_> = shard.dims[dim].iter().map(|run| vec![run.hf, run.len]).collect();
                let want: Vec<_> =
                    want.as_array().unwrap().iter().map(numbers).filter(|run| run[1] > 0).collect();
                assert_eq!(got, want, "{id} rank {number} dim {dim}");
                assert_eq!(
                    shard.shape[dim],
                    want.iter().map(|run| run[1]).sum::<u64>(),
                    "{id} rank {number}"
                );
            }
            placed += 1;
        }
        assert_eq!(result.shard(Rank(70_000)), None, "{id}");
    }
    assert_eq!((placed > 200, refused), (true, 2), "{placed} placed, {refused} refused");
}

/// Shape, mesh, ranks (empty: 0, 1, 2…), placements, and `extents@starts` of each rank in mesh order.
fn starts(shape: &[u64], mesh: &[u64], ranks: &[u32], placements: &[Placement]) -> String {
    let count = u32::try_from(mesh.iter().product::<u64>()).unwrap();
    let ranks: Vec<_> = if ranks.is_empty() {
        (0..count).map(Rank).collect()
    } else {
        ranks.iter().copied().map(Rank).collect()
    };
    let mesh = match Mesh::new(mesh.to_vec(), ranks.clone()) {
        Ok(mesh) => mesh,
        Err(error) => return error.to_string(),
    };
    let placed = match Placed::new(shape.to_vec(), mesh, placements) {
        Ok(placed) => placed,
        Err(error) => return error.to_string(),
    };
    let show = |rank: &Rank| {
        let shard = placed.shard(*rank).unwrap();
        let start = |dim: usize| shard.dims[dim].first().map_or(shape[dim], |run| run.hf);
        let extents: Vec<_> = shard.shape.iter().map(u64::to_string).collect();
        let starts: Vec<_> = (0..shape.len()).map(|dim| start(dim).to_string()).collect();
        format!("{}@{}", extents.join("x"), starts.join(","))
    };
    ranks.iter().map(show).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_remaining_examples_of_the_catalogue_hold() {
    use Placement::{Replicate, Shard, StridedShard};
    let s = |dim| Shard { dim };
    let ss = |split_factor| StridedShard { dim: 0, split_factor };
    let order_2_0_1 = starts(&[48], &[2, 3, 2], &[], &[ss(2), ss(2), s(0)]);
    assert_eq!(order_2_0_1, "4@0 4@24 4@4 4@28 4@8 4@32 4@12 4@36 4@16 4@40 4@20 4@44");
    assert_eq!(starts(&[12], &[3], &[1, 5, 9], &[s(0)]), "4@0 4@4 4@8");
    assert_eq!(
        starts(&[8, 6, 4], &[2, 2], &[], &[s(0), s(1)]),
        "4x3x4@0,0,0 4x3x4@0,3,0 4x3x4@4,0,0 4x3x4@4,3,0"
    );
    let two_dims_uneven = starts(&[5, 7], &[2, 3], &[], &[s(1), s(0)]);
    assert_eq!(two_dims_uneven, "2x4@0,0 2x4@2,0 1x4@4,0 2x3@0,4 2x3@2,4 1x3@4,4");
    assert_eq!(starts(&[4, 10], &[4], &[], &[s(-1)]), "4x3@0,0 4x3@0,3 4x3@0,6 4x1@0,9");
    assert_eq!(starts(&[], &[2], &[], &[Replicate]), "@ @");
    // Three dims of one tensor dim, every split uneven: the parts still tile the tensor.
    assert_eq!(starts(&[7], &[2, 2], &[], &[ss(2), s(0)]), "2@0 2@4 2@2 1@6");
}

#[test]
fn what_cannot_be_placed_is_refused_by_its_placement() {
    use Placement::{Partial, Replicate, Shard, StridedShard};
    let s = |dim| Shard { dim };
    let ss = |split_factor| StridedShard { dim: 0, split_factor };
    for (mesh, ranks, placements, want) in [
        (&[2][..], &[0, 1, 2][..], &[s(0)][..], "a mesh of shape [2] cannot hold 3 ranks"),
        (&[2], &[3, 3], &[s(0)], "rank 3 is in the mesh twice"),
        (&[2], &[], &[s(0), Replicate], "2 placements are given for a mesh of 1 dims"),
        (&[2], &[], &[s(2)], "placement 0 cuts dim 2 of a tensor with 2 dims"),
        (&[2], &[], &[s(-3)], "placement 0 cuts dim -3 of a tensor with 2 dims"),
        (&[2], &[], &[s(i64::MIN)], "placement 0 cuts dim -9223372036854775808 of a tensor with 2 dims"),
        (&[2, 2], &[], &[s(0), Partial], "placement 1 is Partial: a reduction was forgotten"),
        (&[4], &[], &[ss(2)], "placement 0 has split factor 2, which no mesh dims to its right multiply to"),
        (
            &[4, 2],
            &[],
            &[ss(0), s(0)],
            "placement 0 has split factor 0, which no mesh dims to its right multiply to",
        ),
        (
            &[4, 2],
            &[],
            &[ss(4), s(0)],
            "placement 0 has split factor 4, which no mesh dims to its right multiply to",
        ),
        (
            &[4, 2],
            &[],
            &[ss(2), s(1)],
            "placement 0 has split factor 2, which no mesh dims to its right multiply to",
        ),
    ] {
        assert_eq!(starts(&[8, 8], mesh, ranks, placements), want);
    }
}

#[test]
fn equal_placements_compare_equal_however_they_are_written() {
    use Placement::{Replicate, Shard, StridedShard};
    let placed = |placements: &[Placement]| {
        let mesh = Mesh::new(vec![1, 4, 1], (0..4).map(Rank).collect()).unwrap();
        Placed::new(vec![8, 8], mesh, placements).unwrap()
    };
    let plain = placed(&[Replicate, Shard { dim: 1 }, Replicate]);
    assert_eq!(
        placed(&[Shard { dim: 0 }, Shard { dim: -1 }, StridedShard { dim: 1, split_factor: 9 }]),
        plain
    );
    assert_ne!(placed(&[Replicate, Shard { dim: 0 }, Replicate]), plain);
}
