//! Layouts that ranks recorded: they mean what the rules meant that made the same pieces, and what cannot be is refused.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use weightrefit_core::layout::recording::{RecordedPiece, normalize, record};
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::model::{TensorTable, read_list};

fn recorded(layout: &Layout) -> Document {
    let rank = |rank| record(&layout.rank_regions(rank).unwrap(), layout.table());
    Document::recorded(layout.ranks().map(rank).collect(), BTreeMap::new())
}

#[test]
fn what_the_ranks_of_any_layout_record_is_that_layout() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/layout/small");
    let mut cases = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut case: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let tensors = json!({"tensors": case["tensors"].take()}).to_string();
        let table = read_list(&tensors).unwrap();
        let rules = Layout::new(&Document::from_value(&case["document"]).unwrap(), &table).unwrap();
        let first =
            Layout::new(&recorded(&rules), &table).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let canonical: Value = serde_json::from_str(&first.canonical()).unwrap();
        let second = Layout::new(&Document::from_value(&canonical).unwrap(), &table).unwrap();
        assert_eq!(second.canonical(), first.canonical());
        assert_eq!(second.world(), rules.world());
        assert_eq!(second.check(), rules.check(), "{}", path.display());
        for rank in rules.ranks() {
            let (want, got) = (rules.rank(rank).unwrap(), second.rank(rank).unwrap());
            assert_eq!(
                record(&got.regions, &table),
                record(&want.regions, &table),
                "{} rank {rank}",
                path.display()
            );
            assert_eq!(got.pads, want.pads, "{} rank {rank}", path.display());
            for (id, _) in table.iter().filter(|(id, _)| second.alias(*id) == rules.alias(*id)) {
                assert_eq!(second.holds(id), rules.holds(id));
            }
        }
        cases += 1;
    }
    assert!(cases >= 14, "{cases} cases");
}

#[test]
fn cuts_of_runs_and_the_order_of_pieces_do_not_matter() {
    let piece = |tensor: &str, run: &[(u64, u64, u64)], permute| RecordedPiece {
        tensor: tensor.to_owned(),
        lead: None,
        dims: vec![run.to_vec()],
        permute,
    };
    let mut pieces =
        [piece("b", &[(0, 4, 2), (2, 6, 2)], Some(vec![0])), piece("a", &[(4, 0, 2), (6, 4, 2)], None)];
    normalize(&mut pieces);
    assert_eq!(pieces, [piece("a", &[(4, 0, 2), (6, 4, 2)], None), piece("b", &[(0, 4, 4)], None)]);
}

fn verdict(document: &Value, table: &TensorTable) -> String {
    let layout = Document::from_value(document).and_then(|document| Layout::new(&document, table));
    match layout.and_then(|layout| layout.check()) {
        Ok(()) => "fine".to_owned(),
        Err(error) => format!("{} {error}", error.code()),
    }
}

#[test]
fn what_no_rank_can_hold_is_refused_by_name() {
    let tensors = json!({"tensors": [
        {"name": "w", "shape": [4, 2], "dtype": "f32"},
        {"name": "v", "shape": [4, 2], "dtype": "f32"},
    ]});
    let table = read_list(&tensors.to_string()).unwrap();
    let local = |shape: &Value, pieces: Value| json!({"name": "x", "dtype": "bf16", "shape": shape, "pieces": pieces});
    let one = |tensor: Value| json!({"layout": "v1", "ranks": [[tensor]]});
    let rows = |low: u64, len: u64| json!([[[low, low, len]], [[0, 0, 2]]]);
    let whole = json!({"tensor": "w", "dims": rows(0, 4)});
    let square = json!([4, 2]);
    let table_of = [
        (one(local(&square, json!([whole]))), "fine"),
        (
            one(local(&json!([8, 2]), json!([whole, {"tensor": "v", "dims": [[[4, 0, 4]], [[0, 0, 2]]]}]))),
            "fine",
        ),
        (
            one(local(
                &json!([3, 2, 4]),
                json!([{"tensor": "w", "lead": 2, "dims": rows(0, 4), "permute": [1, 0]}]),
            )),
            "fine",
        ),
        (
            json!({"layout": "v1", "ranks": [[local(&square, json!([whole])), local(&square, json!([]))]]}),
            "LayoutRejected local tensor `x` of rank 0 is recorded twice",
        ),
        (
            one(local(&square, json!([{"tensor": "u", "dims": rows(0, 4)}]))),
            "LayoutRejected local tensor `x` of rank 0 holds `u`, which is no tensor of the model",
        ),
        (
            one(local(&json!([3, 2]), json!([whole]))),
            "LayoutRejected local tensor `x` of rank 0 holds `w` wrongly: dim 0: run of 4 at HF 0 and local 0 does not fit (HF extent 4, local 0..3) (in `x`)",
        ),
        (
            one(local(&square, json!([{"tensor": "w", "dims": [[], [[0, 0, 2]]]}]))),
            "LayoutRejected local tensor `x` of rank 0 holds nothing of `w`",
        ),
        (
            one(local(&square, json!([whole, {"tensor": "v", "dims": rows(3, 1)}]))),
            "LayoutRejected local tensor `x` of rank 0 holds `w` and `v` in the same elements",
        ),
        (
            one(local(&square, json!([{"tensor": "w", "dims": rows(1, 3)}]))),
            "CoverageGap no rank holds 2 of the 8 elements of tensor `w`",
        ),
        (json!({"layout": "v1", "ranks": []}), "LayoutRejected world is 0, 1 to 65536 ranks are allowed"),
        (json!({"layout": "v2", "ranks": []}), "LayoutRejected layout is `v2`, only `v1` is known"),
        (
            json!({"layout": "v1", "ranks": [], "rules": []}),
            "LayoutRejected the document has the unknown key `rules`, nearest is `ranks`",
        ),
        (
            json!({"layout": "v1", "ranks": [[{"name": "x"}]]}),
            "LayoutRejected `ranks` cannot be read: missing field `dtype`",
        ),
    ];
    for (document, want) in table_of {
        assert_eq!(verdict(&document, &table), want, "{document}");
    }
}
