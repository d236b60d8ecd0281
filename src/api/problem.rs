//! What can be wrong with a document, where, and what to do about it.

use crate::api::mistaken::Sort;
use crate::api::sample;
use std::fmt;
use weightrefit_core::code::Code;
use weightrefit_core::layout::LayoutError;
use weightrefit_core::model::TableError;

/// Path of a field: `spec.inference.pools[0].name`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FieldPath(Vec<Segment>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Segment {
    Key(String),
    Index(usize),
}

impl FieldPath {
    /// The path of the keys in `dotted`, which holds no index.
    #[must_use]
    pub fn of(dotted: &str) -> Self {
        Self(dotted.split('.').map(|key| Segment::Key(key.to_owned())).collect())
    }

    /// The path of `key` below this one.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let mut segments = self.0.clone();
        segments.extend(key.split('.').map(|key| Segment::Key(key.to_owned())));
        Self(segments)
    }

    /// The path of `key`, which may hold dots itself, below this one.
    #[must_use]
    pub fn entry(&self, key: &str) -> Self {
        let mut segments = self.0.clone();
        segments.push(Segment::Key(key.to_owned()));
        Self(segments)
    }

    /// The path of the element `index` below this one.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        let mut segments = self.0.clone();
        segments.push(Segment::Index(index));
        Self(segments)
    }

    /// The path with its indices left out: `spec.inference.pools.name`.
    pub(crate) fn without_indices(&self) -> String {
        let keys = self.0.iter().filter_map(|segment| match segment {
            Segment::Key(key) => Some(key.as_str()),
            Segment::Index(_) => None,
        });
        keys.collect::<Vec<_>>().join(".")
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.0
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, segment) in self.0.iter().enumerate() {
            match segment {
                // Keys of free maps (ConfigMap data, annotations) hold dots themselves.
                Segment::Key(key) if key.contains('.') => write!(f, "[{key:?}]")?,
                Segment::Key(key) if position == 0 => f.write_str(key)?,
                Segment::Key(key) => write!(f, ".{key}")?,
                Segment::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// Line and column in a file, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: u64,
    /// Column, in characters.
    pub column: u64,
}

/// One thing that is wrong with a document.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text is no YAML.
    #[error("{0}")]
    Yaml(String),
    /// A plain scalar that YAML 1.1 and YAML 1.2 read as different values.
    #[error("`{scalar}` means different things to different YAML readers")]
    Ambiguous {
        /// The scalar as written.
        scalar: String,
    },
    /// A key that this place does not have.
    #[error("unknown key `{key}`")]
    UnknownKey {
        /// The key.
        key: String,
        /// The keys of this place.
        known: Vec<String>,
    },
    /// A key that must be there.
    #[error("required key `{0}` is missing")]
    Missing(String),
    /// Another sort of document than belongs here.
    #[error("this is {}, not {}", found.name(), wanted.name())]
    OtherSort {
        /// What it is.
        found: Sort,
        /// What belongs here.
        wanted: Sort,
    },
    /// A value of another kind than the field holds.
    #[error("expected {expected}, found {found}")]
    WrongType {
        /// What the field holds.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A value that is not of the field's closed set.
    #[error("unknown value `{value}`")]
    UnknownValue {
        /// The value.
        value: String,
        /// The set.
        known: Vec<String>,
    },
    /// A number outside the field's bounds.
    #[error("{value} is not between {least} and {most}")]
    OutOfBounds {
        /// The number.
        value: i64,
        /// Least allowed.
        least: i64,
        /// Most allowed.
        most: i64,
    },
    /// Too few, too many, too long.
    #[error("{what} has {count} {unit}, allowed are {least} to {most}")]
    Length {
        /// What is counted in.
        what: &'static str,
        /// What is counted.
        unit: &'static str,
        /// How many there are.
        count: usize,
        /// Least allowed.
        least: usize,
        /// Most allowed.
        most: usize,
    },
    /// Text of another form than the field holds.
    #[error("`{value}` is not {expected}")]
    Malformed {
        /// The text.
        value: String,
        /// The form.
        expected: &'static str,
    },
    /// A union holds a member of another type.
    #[error("type is `{kind}`, but member `{member}` is set")]
    ForeignMember {
        /// The discriminator.
        kind: String,
        /// The member.
        member: &'static str,
    },
    /// A union lacks the member of its type.
    #[error("type is `{kind}`, but its member `{member}` is missing")]
    MissingMember {
        /// The discriminator.
        kind: String,
        /// The member.
        member: &'static str,
    },
    /// Two elements of a list-map have one key.
    #[error("`{0}` is there twice")]
    Duplicate(String),
    /// Two numbers must divide each other and do not.
    #[error("{value} and {other_name} {other} do not divide each other")]
    Indivisible {
        /// The number at the place.
        value: i64,
        /// The other field.
        other_name: &'static str,
        /// Its number.
        other: i64,
    },
    /// The world is no whole number of pods.
    #[error("{value} is not a multiple of {other_name} {other}")]
    NoMultiple {
        /// The number at the place.
        value: i64,
        /// The other field.
        other_name: &'static str,
        /// Its number.
        other: i64,
    },
    /// Two values that exclude each other.
    #[error("`{value}` excludes {other_name} `{other}`")]
    Excluded {
        /// The value at the place.
        value: &'static str,
        /// The other field.
        other_name: &'static str,
        /// Its value.
        other: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A value that the contract has and this version cannot do.
    #[error("`{value}` is not supported by this version")]
    Unsupported {
        /// The value.
        value: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// An object that a field names is not among the documents.
    #[error("{kind} `{name}` is not in the given files")]
    NotGiven {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Those of that kind that are there.
        given: Vec<String>,
    },
    /// A ConfigMap has no such key.
    #[error("ConfigMap `{name}` has no key `{key}`")]
    NoSuchKey {
        /// The ConfigMap.
        name: String,
        /// The key.
        key: String,
        /// Its keys.
        given: Vec<String>,
    },
    /// The layout has another number of ranks than its side.
    #[error("the layout has {world} ranks, but {field} is {ranks}")]
    OtherWorld {
        /// Ranks of the layout.
        world: u32,
        /// Ranks of the side.
        ranks: i32,
        /// The field that says it.
        field: &'static str,
    },
    /// A layout that does not hold together, or does not fit the model.
    #[error(transparent)]
    Layout(Box<LayoutError>),
    /// A preset whose cuts do not come out, and the sizes of that axis with which they do.
    #[error("{error}")]
    PresetSize {
        /// Why.
        error: Box<LayoutError>,
        /// The axis.
        axis: String,
        /// Sizes with which the layout fits model and ranks.
        sizes: Vec<u64>,
    },
    /// A list of tensors that cannot be used.
    #[error(transparent)]
    Table(Box<TableError>),
    /// Data of a ConfigMap that expands too far.
    #[error("key `{key}` cannot be decoded: it expands to more than {bytes_max} bytes")]
    TooLarge {
        /// The key.
        key: String,
        /// The bound.
        bytes_max: u64,
    },
    /// Data of a ConfigMap that cannot be decoded.
    #[error("key `{key}` cannot be decoded: {reason}")]
    Undecodable {
        /// The key.
        key: String,
        /// Why.
        reason: String,
    },
}

impl Problem {
    /// What a person can do about it, where it is the problem of the field `at`.
    #[must_use]
    pub fn hint(&self, at: &FieldPath) -> String {
        match self {
            Self::Yaml(_) => "Correct the YAML at that place.".into(),
            Self::Ambiguous { scalar }
                if scalar.starts_with(|c: char| c.is_ascii_digit() || "+-".contains(c)) =>
            {
                format!("Write the number without leading zeros, or quote the text: \"{scalar}\".")
            }
            Self::Ambiguous { scalar } => {
                format!("Write `true` or `false`, or quote the text: \"{scalar}\".")
            }
            Self::UnknownKey { key, known } | Self::UnknownValue { value: key, known } => {
                near_or_all(key, known)
            }
            Self::Missing(key) => format!("Add it there, for example `{}`.", sample::line(at, key)),
            Self::OtherSort { found, .. } => found.place().into(),
            Self::WrongType { expected, .. } => format!("Write {expected} there."),
            Self::OutOfBounds { least, most, .. } => format!("Choose a number from {least} to {most}."),
            Self::Length { .. } => "Correct the number of them.".into(),
            Self::Malformed { expected, .. } => format!("Write {expected}."),
            Self::ForeignMember { kind, member } => {
                format!("Remove `{member}`, or change `type: {kind}` to the type that has this member.")
            }
            Self::MissingMember { member, .. } => {
                format!("Add it, for example `{}`, or choose another type.", sample::line(at, member))
            }
            Self::Duplicate(_) => "Give each its own name.".into(),
            Self::Indivisible { .. } => {
                "A replica is a whole number of pods, or a pod a whole number of replicas.".into()
            }
            Self::NoMultiple { .. } => "A side is a whole number of pods: correct one of the two.".into(),
            Self::Excluded { hint, .. } | Self::Unsupported { hint, .. } => (*hint).into(),
            Self::NotGiven { kind, name, given } => match nearest(name, given) {
                Some(near) => format!("Did you mean {kind} `{near}`? Otherwise add its file with `-f`."),
                None => format!("Add the file that holds {kind} `{name}` with `-f`."),
            },
            Self::NoSuchKey { key, given, .. } => near_or_all(key, given),
            Self::OtherWorld { .. } => "Correct `world` of the layout, or the size of the side.".into(),
            Self::Layout(error) => layout_hint(error),
            Self::PresetSize { axis, sizes, .. } => {
                format!(
                    "Choose a size of `{axis}` that fits this model and these ranks: {}. Or give the layout inline.",
                    any_of(sizes)
                )
            }
            Self::Table(error) => error.hint(),
            Self::TooLarge { .. } | Self::Undecodable { .. } => {
                "Write the text under `data`, or base64 (of gzip, if you like) under `binaryData`.".into()
            }
        }
    }

    /// The code under which resource conditions show it.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::OtherWorld { .. } => Some(Code::LayoutRejected),
            Self::Layout(error) | Self::PresetSize { error, .. } => Some(error.code()),
            Self::Table(error) => Some(error.code()),
            Self::Unsupported { .. } => Some(Code::Unsupported),
            _ => None,
        }
    }
}

impl From<LayoutError> for Problem {
    fn from(error: LayoutError) -> Self {
        Self::Layout(Box::new(error))
    }
}

impl From<TableError> for Problem {
    fn from(error: TableError) -> Self {
        Self::Table(Box::new(error))
    }
}

/// The remedy where one is nearer at hand than that of the code.
pub(crate) fn layout_hint(error: &LayoutError) -> String {
    let sizes = error.fitting_sizes();
    let sizes =
        sizes.map(|(axis, sizes)| format!("Choose a size of `{axis}` that divides: {}. ", any_of(&sizes)));
    let remedy = match error {
        LayoutError::MissingKey { place, key } => {
            return format!("Add it there, for example `{}`.", sample::layout_line(place, key));
        }
        LayoutError::NoRule { .. } => {
            "Add a rule for the tensor, or put it under `ignore` where this side has no such tensor."
        }
        LayoutError::Uncut { .. } => {
            "If the side cuts unevenly, give that cut `kind: chunk` or `kind: balanced` in a document of your own."
        }
        LayoutError::SlotHole { .. } => "Number the slots of a local tensor 0, 1, … without a hole.",
        LayoutError::SlotTwice { .. } => "Give each tensor of a local tensor its own slot.",
        LayoutError::StackHole { .. } => {
            "A stack needs every expert of its rank: correct `expert`, or the tensors."
        }
        LayoutError::GridWorld { .. } => {
            "Correct `sizes` or `world`; one axis of a grid may be left out and then follows from `world`."
        }
        LayoutError::UnknownPreset { .. } | LayoutError::PresetRevision { .. } => {
            "`weightrefit layout presets` lists them with their revisions."
        }
        LayoutError::PresetNeedsModel { .. } => {
            "Choose model type HuggingFaceConfig, or give the layout inline."
        }
        LayoutError::ExpertsUneven { .. } => "Or give `expert` the kind `chunk` or `balanced`.",
        LayoutError::StagesUneven { .. } => {
            "Or give the layout inline: a preset does not guess how this model is split."
        }
        LayoutError::PresetLayers { .. } | LayoutError::PresetTied { .. } => {
            "Give the layout inline: a preset does not guess how this model is split."
        }
        LayoutError::TensorGap { .. } => {
            "Correct the cuts of that tensor's rule, or the stages that hold it."
        }
        _ => error.code().remedy(),
    };
    sizes.unwrap_or_default() + remedy
}

/// `1, 2 or 4`.
fn any_of(sizes: &[u64]) -> String {
    let words: Vec<String> = sizes.iter().map(u64::to_string).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The known name that `name` is a typo of, if one is near enough.
pub(crate) fn nearest<'k>(name: &str, known: &'k [String]) -> Option<&'k str> {
    let near = weightrefit_core::nearest::nearest(name, known.iter().map(String::as_str))?;
    // 0.8 lets one or two wrong letters pass and keeps unrelated words apart.
    (strsim::jaro_winkler(&name.to_lowercase(), &near.to_lowercase()) > 0.8).then_some(near)
}

fn near_or_all(name: &str, known: &[String]) -> String {
    match nearest(name, known) {
        Some(near) => format!("Did you mean `{near}`?"),
        None if known.is_empty() => "Nothing can stand here: remove it.".into(),
        None => {
            format!("Known here: {}.", known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", "))
        }
    }
}

/// One problem of one document, with its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}{}: {}{problem}", at(.position), field(.path))]
pub struct Refusal {
    /// The file as given.
    pub file: String,
    /// Where in it, when known.
    pub position: Option<Position>,
    /// Which field, empty for the whole document.
    pub path: FieldPath,
    /// What is wrong.
    pub problem: Box<Problem>,
}

fn at(position: &Option<Position>) -> String {
    position.map(|p| format!(":{}:{}", p.line, p.column)).unwrap_or_default()
}

fn field(path: &FieldPath) -> String {
    let path = path.to_string();
    if path.is_empty() { path } else { format!("{path}: ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_key_is_suggested_and_a_far_one_lists_all() {
        let known = ["worldSize".to_owned(), "ranks".to_owned()];
        for (key, want) in [
            ("worldsize", "Did you mean `worldSize`?"),
            ("wordSize", "Did you mean `worldSize`?"),
            ("flavour", "Known here: `worldSize`, `ranks`."),
        ] {
            let problem = Problem::UnknownKey { key: key.into(), known: known.to_vec() };
            assert_eq!(problem.hint(&FieldPath::default()), want);
        }
    }

    #[test]
    fn paths_read_like_the_document() {
        let path = FieldPath::of("spec.inference").key("pools").index(1).key("layout.type");
        assert_eq!(path.to_string(), "spec.inference.pools[1].layout.type");
    }
}
