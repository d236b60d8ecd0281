//! The known word nearest to one that is not known: what error messages suggest.

/// The candidate that `word` begins, as an abbreviation does, else the one with the fewest edits to it; of equals the
/// first. `None` without candidates.
#[must_use]
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // The distance takes time in the product of both lengths, and `word` comes from outside.
    let head: String = word.chars().take(64).collect();
    let begun = |known: &str| head.len() > 2 && known.starts_with(&head);
    candidates.into_iter().min_by_key(|known| (!begun(known), strsim::damerau_levenshtein(&head, known)))
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_swapped_letter_is_nearer_than_another_word() {
        assert_eq!(nearest("graiN", ["pad", "grain", "grid"]), Some("grain"));
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn an_abbreviated_word_is_nearer_than_one_with_fewer_edits() {
        assert_eq!(nearest("bfloat", ["float", "bfloat16"]), Some("bfloat16"));
    }
}
