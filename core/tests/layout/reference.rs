//! The layouts agree with the executable reference of the vocabulary, whose results are stored in
//! `testdata/layout` by `regenerate.py`.

use crate::listing::listing;
use serde_json::Value;
use std::path::{Path, PathBuf};
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::model::read_list;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/layout")
}

#[test]
fn every_rank_of_the_small_cases_holds_what_the_reference_says() {
    let mut cases = 0;
    for entry in std::fs::read_dir(folder().join("small")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut case: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let document = Document::from_value(&case["document"]).unwrap();
        let tensors = serde_json::json!({"tensors": case["tensors"].take()}).to_string();
        let table = read_list(&tensors).unwrap();
        let layout = Layout::new(&document, &table).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut text = String::new();
        for rank in layout.ranks() {
            let regions = layout.rank_regions(rank).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            text += &listing(&table, rank, &regions);
        }
        let want = std::fs::read_to_string(path.with_extension("txt")).unwrap();
        for (line, (got, want)) in text.lines().zip(want.lines()).enumerate() {
            assert_eq!(got, want, "{} line {}", path.display(), line + 1);
        }
        assert_eq!(text.len(), want.len(), "{}", path.display());
        cases += 1;
    }
    assert!(cases >= 14, "{cases} cases");
}
