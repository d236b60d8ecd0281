//! Every check of the loader refuses a document that breaks it, in words that name the place.
//!
//! The first line of each file in `testdata/layout/broken` is what its document gives on `tensors.json`: the code
//! and the sentence. `_works.yaml` is the document of which the others are variations.

use std::path::Path;
use weightrefit_core::layout::{Document, Layout, LayoutError};
use weightrefit_core::model::{TensorTable, read_list};

fn verdict(text: &str, table: &TensorTable) -> String {
    let checked = |document: &Document| Layout::new(document, table)?.check();
    match Document::parse(text).and_then(|document| checked(&document)) {
        Ok(()) => "fine".to_owned(),
        Err(error) => format!("{} {error}", error.code()),
    }
}

#[test]
fn every_broken_document_is_refused_in_its_own_words() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/layout/broken");
    let table = read_list(&std::fs::read_to_string(folder.join("tensors.json")).unwrap()).unwrap();
    let rewrite = std::env::var_os("REWRITE").is_some();
    let mut differences = String::new();
    let mut cases = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let (first, body) = text.split_once('\n').unwrap();
        let (want, got) = (first.strip_prefix("# want: ").unwrap(), verdict(body, &table));
        if rewrite {
            std::fs::write(&path, format!("# want: {got}\n{body}")).unwrap();
        } else if got != want {
            differences += &format!("{}\n  want {want}\n  got  {got}\n", path.file_name().unwrap().display());
        }
        assert!(
            got != "fine" || path.file_stem().unwrap() == "_works" || rewrite,
            "{} is accepted",
            path.display()
        );
        cases += 1;
    }
    assert!(differences.is_empty(), "{differences}");
    assert!(cases > 100, "{cases} cases");
}

#[test]
fn what_is_too_long_is_refused_before_it_is_read() {
    let long = format!("# {}\n", "x".repeat(1 << 20));
    assert!(matches!(Document::parse(&long), Err(LayoutError::TooLong { found: 1_048_579 })));
    let rules = |count: usize| {
        let rules = "{hf: a, to: b},".repeat(count);
        format!(
            "{{layout: v1, world: 1, grids: {{a: []}}, stages: {{axis: x, layers: []}}, rules: [{rules}]}}"
        )
    };
    assert!(Document::parse(&rules(4096)).is_ok());
    let error = Document::parse(&rules(4097)).unwrap_err();
    assert_eq!(error.to_string(), "`rules` has 4097 entries, at most 4096 are read");
}
