//! docs/weightrefit.md against the resource's types, rules and refusals: the page has every field, every value and
//! every default, and nothing else; the lines that hints offer can be followed.

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use weightrefit::api::documents::{Documents, SourceText};
use weightrefit::api::manifest::Manifest;
use weightrefit::api::problem::{Problem, Refusal};
use weightrefit::api::refit::WeightRefitSpec;
use weightrefit::api::supported;

const PAGE: &str = include_str!("../../docs/weightrefit.md");

/// Valid, with every field that has bounds and every struct that has a closed set of values.
const REFIT: &str = "
apiVersion: weightrefit.dev/v1alpha1
kind: WeightRefit
metadata: {name: full}
spec:
  model: {type: Registered}
  training:
    worldSize: 8
    ranks: {type: StatefulSet, ranksPerPod: 1}
    layout: {type: Preset, preset: {name: fsdp2/hf, revision: 1, sizes: {dp_shard: 8}}}
    publish: {mode: Auto, maxHoldSeconds: 2}
  inference:
    pools:
    - name: default
      ranksPerReplica: 2
      minReplicas: 1
      ranks: {type: StatefulSet, ranksPerPod: 2}
      layout: {type: Preset, preset: {name: fsdp2/hf, revision: 1, sizes: {dp_shard: 2}}}
      serving: {type: WithinStaleness, withinStaleness: {maxStaleSteps: 1, maxStaleSeconds: 1}}
  commit: {strategy: {type: Rolling, rolling: {maxUnavailable: 1}}}
  lag: {maxSteps: 0}
  transfer: {}
  timeouts: {}
";

struct Row {
    takes: &'static str,
    default: &'static str,
}

fn rows() -> BTreeMap<&'static str, Row> {
    let lines = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let row = |(field, rest): (&'static str, &'static str)| {
        let mut cells = rest.split(" | ");
        let (takes, default) = (cells.next().expect(field), cells.next().expect(field));
        assert!(cells.next().is_some_and(|effect| effect.len() > 3), "{field} has no effect");
        (field, Row { takes, default })
    };
    lines.map(row).collect()
}

/// The words in backticks.
fn words(text: &str) -> BTreeSet<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Integer,
    Words(&'static [&'static str]),
    Other,
}

/// Every field of a WeightRefit that is not thrown away, as its own `Deserialize` asks for it.
fn fields() -> BTreeMap<String, Kind> {
    let found = RefCell::new(BTreeMap::new());
    Manifest::deserialize(Ask { path: String::new(), found: &found, without: "" })
        .expect("all fields are given");
    found.into_inner()
}

/// Whether the type can do without the field.
fn is_required(field: &str) -> bool {
    let found = RefCell::new(BTreeMap::new());
    Manifest::deserialize(Ask { path: String::new(), found: &found, without: field }).is_err()
}

#[test]
fn the_page_has_every_field_and_no_other() {
    let (fields, rows) = (fields(), rows());
    let fields: BTreeSet<&str> = fields.keys().map(String::as_str).collect();
    let rows: BTreeSet<&str> = rows.into_keys().collect();
    assert_eq!(fields.difference(&rows).collect::<Vec<_>>(), Vec::<&&str>::new(), "missing on the page");
    assert_eq!(rows.difference(&fields).collect::<Vec<_>>(), Vec::<&&str>::new(), "no such fields");
}

#[test]
fn the_page_has_the_defaults_of_the_types() {
    let minimal = json!({
        "model": {"type": "Registered"},
        "training": {"worldSize": 1, "ranks": {"type": "StatefulSet"}},
        "inference": {"pools": [{"name": "p", "ranksPerReplica": 1, "ranks": {"type": "StatefulSet"}}]},
    });
    let spec: WeightRefitSpec = serde_json::from_value(minimal).expect("required fields suffice");
    let written = json!({"spec": serde_json::to_value(spec).expect("a spec has text keys")});
    for (field, Row { default, .. }) in rows() {
        let end = field.rsplit('.').next().expect(field);
        // An element of a list stands where its list does.
        let key = end.strip_suffix("[]").unwrap_or(end);
        let asked = field.strip_suffix(end).expect(field).to_owned() + key;
        let found = at(&written, field);
        // A struct may be left out as a whole whose `type` must be there when it is not.
        let parent = field.rsplit_once('.').map_or("", |(parent, _)| parent.trim_end_matches("[]"));
        let required = is_required(&asked) && (found.is_none() || is_required(parent));
        assert_eq!(default == "required", required, "{field}");
        let shown = match found {
            _ if default == "required" => continue,
            None | Some(Value::Null) => "none".to_owned(),
            Some(Value::String(text)) => format!("`{text}`"),
            Some(value) => format!("`{value}`"),
        };
        // Below a member that is absent nothing has a default, and metadata is not part of a spec.
        if field.starts_with("spec.") && found.is_some() {
            assert_eq!(default, shown, "{field}");
        }
    }
}

#[test]
fn the_page_has_the_values_and_bounds_that_are_accepted() {
    let rows = rows();
    for (field, kind) in fields() {
        let Row { takes, .. } = rows[field.as_str()];
        match kind {
            Kind::Other => {}
            Kind::Words(known) => {
                assert_eq!(words(takes), known.iter().copied().collect(), "{field}");
                let later = takes.split_once("; not yet ").map_or("", |(_, later)| later);
                let refused = known.iter().copied().filter(|word| is_unsupported(&field, word)).collect();
                assert_eq!(words(later), refused, "{field}: `not yet` and what is refused as Unsupported");
            }
            Kind::Integer => {
                let bounds = takes.split(',').map(str::trim).collect::<String>();
                let (least, rest) = bounds.split_once(" to ").unwrap_or_else(|| panic!("{field}: {takes}"));
                let most: String = rest.chars().take_while(char::is_ascii_digit).collect();
                let (least, most): (i64, i64) = (least.parse().expect(takes), most.parse().expect(takes));
                let want = |value| Problem::OutOfBounds { value, least, most };
                for value in [least - 1, most + 1].into_iter().filter(|value| *value <= i32::MAX.into()) {
                    assert_eq!(problem(&field, json!(value)), Some(want(value)), "{field}");
                }
            }
        }
    }
}

/// From a document without a key to a valid one, doing nothing but what each hint says.
#[test]
fn who_follows_the_hints_for_missing_keys_arrives() {
    let members = [
        "spec: {model: {type: HuggingFaceConfig}}",
        "spec: {model: {type: TensorTable}}",
        "spec: {training: {worldSize: 2, ranks: {type: JobSet}, layout: {type: Preset}}}",
        "spec: {training: {worldSize: 2, ranks: {type: Label}, layout: {type: Inline}}}",
        "spec: {training: {worldSize: 2, ranks: {}, layout: {type: ConfigMap}, workloadRef: {}}}",
        "spec: {inference: {pools: [{serving: {type: WithinStaleness}}]}, commit: {strategy: {type: Rolling}}}",
        "spec: {inference: {pools: [{serving: {type: WithinStaleness, withinStaleness: {}}}]}}",
        "{}",
        "metadata: {}",
    ];
    for start in members {
        let mut document: Value = serde_saphyr::from_str(start).expect(start);
        let mut steps = Vec::new();
        // `kind` is what tells documents apart, so its hint is of the file.
        document["kind"] = json!("WeightRefit");
        while let Err(refusal) = parse(&document) {
            let hint = refusal.problem.hint(&refusal.path);
            let line = hint.split('`').nth(1).unwrap_or_else(|| panic!("{refusal}: {hint}"));
            let (key, value) = line.split_once(": ").unwrap_or_else(|| panic!("{refusal}: {hint}"));
            let value: Value = serde_saphyr::from_str(value).expect(line);
            let path = format!("{}.{key}", refusal.path);
            put(&mut document, path.trim_start_matches('.'), value);
            steps.push(line.to_owned());
            assert!(steps.len() < 20, "{start}: {steps:#?}");
        }
    }
}

fn parse(document: &Value) -> Result<Documents, Refusal> {
    Documents::parse(&[SourceText { file: "x".into(), text: document.to_string() }])
}

fn full() -> Value {
    serde_saphyr::from_str(REFIT).expect("the refit is YAML")
}

/// What is wrong with the full refit when the field has this value.
fn problem(field: &str, value: Value) -> Option<Problem> {
    let mut document = full();
    put(&mut document, field, value);
    parse(&document).err().map(|refusal| *refusal.problem)
}

fn is_unsupported(field: &str, word: &str) -> bool {
    let mut document = full();
    put(&mut document, field, json!(word));
    let Ok(spec) = serde_json::from_value::<WeightRefitSpec>(document["spec"].clone()) else { return false };
    let path = field.replace("[]", "[0]");
    // The full refit asks for other things that cannot be done, so these are taken back first.
    let mut spec = spec;
    if field != "spec.commit.strategy.type" {
        spec.commit.strategy = Default::default();
    }
    if !field.ends_with("serving.type") {
        spec.inference.pools[0].serving = Default::default();
    }
    supported::check(&spec).is_err_and(|(found, _)| found.to_string() == path)
}

/// The value of a field; lists by their first element.
fn at<'v>(document: &'v Value, field: &str) -> Option<&'v Value> {
    field.split('.').try_fold(document, |value, key| match key.strip_suffix("[]") {
        Some(list) => value.get(list)?.get(0),
        None => value.get(key),
    })
}

/// Sets a field, `[]` and `[0]` being the first element of a list, and makes what is missing above it.
fn put(document: &mut Value, field: &str, new: Value) {
    let mut value = document;
    for key in field.split('.') {
        let (key, in_list) = match key.split_once('[') {
            Some((key, _)) => (key, true),
            None => (key, false),
        };
        if !value.is_object() {
            *value = json!({});
        }
        value = &mut value[key];
        if in_list {
            if !value.is_array() {
                *value = json!([null]);
            }
            value = &mut value[0];
        }
    }
    *value = new;
}

/// Gives a type whatever it asks for, and writes down what that was.
struct Ask<'a> {
    path: String,
    found: &'a RefCell<BTreeMap<String, Kind>>,
    /// A field that is not given.
    without: &'a str,
}

type Refused = serde::de::value::Error;

impl Ask<'_> {
    fn is(&self, kind: Kind) {
        self.found.borrow_mut().insert(self.path.clone(), kind);
    }

    fn below(&self, key: &str) -> Self {
        let dot = if self.path.is_empty() || key == "[]" { "" } else { "." };
        Ask { path: format!("{}{dot}{key}", self.path), found: self.found, without: self.without }
    }
}

macro_rules! leaves {
    ($($method:ident: $kind:expr, $visit:ident($value:expr);)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
            self.is($kind);
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Ask<'_> {
    type Error = Refused;

    leaves! {
        deserialize_any: Kind::Other, visit_i64(1);
        deserialize_bool: Kind::Other, visit_bool(true);
        deserialize_i32: Kind::Integer, visit_i64(1);
        deserialize_str: Kind::Other, visit_str("x");
        deserialize_string: Kind::Other, visit_str("x");
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_unit() // thrown away, hence no field
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_some(self)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        self.is(Kind::Other); // keys are free
        visitor.visit_map(Keys { of: self, rest: [].iter(), key: "" })
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_seq(One(Some(self.below("[]"))))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        visitor.visit_map(Keys { of: self, rest: fields.iter(), key: "" })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        self.is(Kind::Words(words));
        visitor.visit_enum(Word(words[0]))
    }

    forward_to_deserialize_any! { i8 i16 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct
    newtype_struct tuple tuple_struct identifier }
}

struct Keys<'a> {
    of: Ask<'a>,
    rest: std::slice::Iter<'static, &'static str>,
    key: &'static str,
}

impl<'de> MapAccess<'de> for Keys<'_> {
    type Error = Refused;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Refused> {
        let without = |key: &&&str| self.of.below(key).path != self.of.without;
        let Some(key) = self.rest.by_ref().find(without) else { return Ok(None) };
        self.key = key;
        seed.deserialize(StrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Refused> {
        seed.deserialize(self.of.below(self.key))
    }
}

struct One<'a>(Option<Ask<'a>>);

impl<'de> SeqAccess<'de> for One<'_> {
    type Error = Refused;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Refused> {
        self.0.take().map(|one| seed.deserialize(one)).transpose()
    }
}

struct Word(&'static str);

impl<'de> EnumAccess<'de> for Word {
    type Error = Refused;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Refused> {
        Ok((seed.deserialize(StrDeserializer::<Refused>::new(self.0))?, self))
    }
}

impl<'de> VariantAccess<'de> for Word {
    type Error = Refused;

    fn unit_variant(self) -> Result<(), Refused> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Refused> {
        seed.deserialize(StrDeserializer::new(self.0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Refused> {
        visitor.visit_str(self.0)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        visitor.visit_str(self.0)
    }
}
