//! Nothing that a document says makes the reader or the evaluation panic, or run without end.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use weightrefit_core::id::Rank;
use weightrefit_core::layout::{Document, Layout, preset};
use weightrefit_core::model::{TensorTable, read_list};

/// A few tensors of each family, small enough to evaluate often.
fn table() -> TensorTable {
    let layer = "model.layers.0";
    let names = [
        ("model.embed_tokens.weight".to_owned(), "[16,8]"),
        ("lm_head.weight".to_owned(), "[16,8]"),
        ("model.norm.weight".to_owned(), "[8]"),
        (format!("{layer}.input_layernorm.weight"), "[8]"),
        (format!("{layer}.self_attn.q_proj.weight"), "[4096,8]"),
        (format!("{layer}.self_attn.k_proj.weight"), "[512,8]"),
        (format!("{layer}.self_attn.v_proj.weight"), "[512,8]"),
        (format!("{layer}.mlp.experts.0.gate_proj.weight"), "[8,8]"),
        (format!("{layer}.mlp.experts.0.up_proj.weight"), "[8,8]"),
        (format!("{layer}.mlp.experts.127.down_proj.weight"), "[8,9]"),
    ];
    let tensors = names.map(|(name, shape)| format!(r#"{{"name":"{name}","shape":{shape},"dtype":"bf16"}}"#));
    read_list(&format!(r#"{{"tensors":[{}]}}"#, tensors.join(","))).unwrap()
}

fn exercise(text: &str) {
    let Ok(document) = Document::parse(text) else { return };
    let Ok(layout) = Layout::new(&document, &table()) else { return };
    assert!(Document::parse(&layout.canonical()).is_ok(), "{}", layout.canonical());
    let _ = (layout.rank(Rank(0)), layout.rank(Rank(layout.world() - 1)), layout.rank(Rank(u32::MAX)));
    if layout.world() <= 64 {
        let _ = layout.check();
    }
}

const SPLICES: [&str; 24] = [
    "18446744073709551615",
    "9223372036854775808",
    "4294967296",
    "0",
    "-1",
    "1",
    "2.5",
    "''",
    "[]",
    "{}",
    "null",
    "~",
    "true",
    "&a",
    "*a",
    "{",
    "}",
    "[",
    "]",
    ":",
    "\n",
    "\n  ",
    "(?P<L>\\d+)",
    "{l}",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_preset_with_words_replaced_is_refused_or_evaluated(
        name in select(preset::names().collect::<Vec<_>>()),
        edits in prop::collection::vec((any::<Index>(), 0_usize..12, select(SPLICES.to_vec())), 1..4),
    ) {
        let mut text: Vec<char> = preset::text(name).unwrap().chars().collect();
        for (at, length, splice) in edits {
            let at = at.index(text.len());
            let end = (at + length).min(text.len());
            text.splice(at..end, splice.chars());
        }
        exercise(&text.into_iter().collect::<String>());
    }

    #[test]
    fn numbers_of_a_preset_can_be_anything(
        name in select(preset::names().collect::<Vec<_>>()),
        numbers in prop::collection::vec(prop_oneof![0_u64..9, any::<u64>(), Just(1_u64 << 62)], 1..5),
        at in any::<Index>(),
    ) {
        let text = preset::text(name).unwrap();
        let digits: Vec<_> = text.match_indices(|c: char| c.is_ascii_digit()).map(|(at, _)| at).collect();
        let mut text = text.to_owned();
        let first = at.index(digits.len());
        for (at, number) in digits[first..].iter().rev().zip(&numbers) {
            text.replace_range(*at..*at + 1, &number.to_string());
        }
        exercise(&text);
    }

    #[test]
    fn any_text_is_refused_without_a_panic(text in ".{0,200}") {
        exercise(&text);
        exercise(&format!("layout: v1\n{text}"));
    }
}
