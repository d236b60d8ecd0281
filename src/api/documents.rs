//! What `-f` gives: several files of several documents, of which WeightRefits and ConfigMaps are used.

use crate::api::check;
use crate::api::manifest::{Manifest, Metadata};
use crate::api::mistaken::Sort;
use crate::api::problem::{FieldPath, Problem, Refusal};
use crate::api::refit::KIND;
use crate::api::source::ConfigMapKey;
use crate::api::strict;
use crate::api::yaml::{Node, Unreadable, Value};
use crate::limits;
use base64::Engine;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeMap;
use std::io::Read;

/// The text of one file.
#[derive(Debug, Clone)]
pub struct SourceText {
    /// The file as the user named it.
    pub file: String,
    /// What it holds.
    pub text: String,
}

impl SourceText {
    /// The refusal of the file as a whole.
    fn refuse(&self, Unreadable { position, problem }: Unreadable) -> Refusal {
        Refusal { file: self.file.clone(), position, path: FieldPath::default(), problem: problem.into() }
    }
}

/// A typed document that still knows where its fields stand.
#[derive(Debug, Clone)]
pub struct Document<T> {
    /// The file it came from, or kind, namespace and name of the object.
    pub file: String,
    /// The document.
    pub value: T,
    /// `None` for an object that an API server sent.
    node: Option<Node>,
}

impl<T> Document<T> {
    /// An object that an API server sent.
    #[must_use]
    pub fn fetched(object: String, value: T) -> Self {
        Self { file: object, value, node: None }
    }

    /// A refusal of the field `path` of this document, with its line where it has lines.
    #[must_use]
    pub fn refuse(&self, path: FieldPath, problem: Problem) -> Refusal {
        let position = self.node.as_ref().map(|node| node.position_of(&path));
        Refusal { file: self.file.clone(), position, path, problem: problem.into() }
    }
}

/// A Kubernetes ConfigMap.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMap {
    /// Name and namespace.
    pub metadata: Metadata,
    /// Text by key.
    #[serde(default)]
    pub data: BTreeMap<String, String>,
    /// Base64 by key; the bytes may be gzip.
    #[serde(default)]
    pub binary_data: BTreeMap<String, String>,
    #[serde(default)]
    api_version: IgnoredAny,
    #[serde(default)]
    kind: IgnoredAny,
    #[serde(default)]
    immutable: IgnoredAny,
}

impl From<v1::ConfigMap> for ConfigMap {
    fn from(map: v1::ConfigMap) -> Self {
        let base64 = |bytes: ByteString| base64::engine::general_purpose::STANDARD.encode(bytes.0);
        let binary = map.binary_data.unwrap_or_default().into_iter();
        let (api_version, kind, immutable) = Default::default();
        Self {
            metadata: map.metadata.into(),
            data: map.data.unwrap_or_default(),
            binary_data: binary.map(|(key, bytes)| (key, base64(bytes))).collect(),
            api_version,
            kind,
            immutable,
        }
    }
}

/// A document that is of no use here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// Its file.
    pub file: String,
    /// Its kind.
    pub kind: String,
    /// Its name, empty when it has none.
    pub name: String,
}

/// The documents of all files.
#[derive(Debug, Default)]
pub struct Documents {
    /// All WeightRefits, in order, each namespace and name once.
    pub refits: Vec<Document<Manifest>>,
    /// What was left out.
    pub ignored: Vec<Ignored>,
    config_maps: Vec<Document<ConfigMap>>,
}

impl Documents {
    /// Reads and checks the documents of `sources`.
    ///
    /// # Errors
    /// With the first problem.
    pub fn parse(sources: &[SourceText]) -> Result<Self, Refusal> {
        let mut documents = Self::default();
        for source in sources {
            for node in Node::documents(&source.text).map_err(|unreadable| source.refuse(unreadable))? {
                documents.add(source, node)?;
            }
        }
        Ok(documents)
    }

    /// The ConfigMaps that an API server sent, for one refit.
    #[must_use]
    pub fn fetched(maps: impl IntoIterator<Item = v1::ConfigMap>) -> Self {
        let document = |map: v1::ConfigMap| {
            let map = ConfigMap::from(map);
            Document::fetched(format!("ConfigMap {}/{}", map.metadata.namespace, map.metadata.name), map)
        };
        Self { config_maps: maps.into_iter().map(document).collect(), ..Self::default() }
    }

    fn add(&mut self, source: &SourceText, node: Node) -> Result<(), Refusal> {
        let whole = |unreadable| source.refuse(unreadable);
        let Some(kind) = node.text("kind") else {
            let problem = match Sort::of(&node).filter(|sort| *sort != Sort::Resource) {
                Some(found) => Problem::OtherSort { found, wanted: Sort::Resource },
                None => Problem::Missing("kind".into()),
            };
            return Err(whole(Unreadable { position: Some(node.position), problem }));
        };
        match kind {
            // What `kubectl get -o yaml` prints for several objects.
            "List" => {
                let Value::Map(entries) = node.value else { return Ok(()) };
                let items =
                    entries.into_iter().filter(|entry| entry.key == "items").map(|entry| entry.node.value);
                let nodes =
                    items.flat_map(|items| if let Value::List(nodes) = items { nodes } else { Vec::new() });
                nodes.into_iter().try_for_each(|node| self.add(source, node))
            }
            KIND => {
                node.refuse_ambiguous(&source.text).map_err(whole)?;
                let document = typed::<Manifest>(&source.file, node)?;
                check::check(&document.value).map_err(|(path, problem)| document.refuse(path, problem))?;
                once(&self.refits, &document, |refit| &refit.metadata)?;
                self.refits.push(document);
                Ok(())
            }
            "ConfigMap" => {
                node.refuse_ambiguous(&source.text).map_err(whole)?;
                let document = typed::<ConfigMap>(&source.file, node)?;
                check::metadata(&FieldPath::of("metadata"), &document.value.metadata)
                    .map_err(|(path, problem)| document.refuse(path, problem))?;
                once(&self.config_maps, &document, |map| &map.metadata)?;
                self.config_maps.push(document);
                Ok(())
            }
            other => {
                let name =
                    node.get("metadata").and_then(|metadata| metadata.text("name")).unwrap_or_default();
                self.ignored.push(Ignored {
                    file: source.file.clone(),
                    kind: other.into(),
                    name: name.into(),
                });
                Ok(())
            }
        }
    }

    /// The bytes that the field `path` of `refit` names by `key`, decoded.
    ///
    /// # Errors
    /// When the ConfigMap or its key is not there, or its data cannot be decoded.
    pub fn bytes(
        &self,
        refit: &Document<Manifest>,
        path: &FieldPath,
        key: &ConfigMapKey,
    ) -> Result<Vec<u8>, Refusal> {
        let wanted = format!("{}/{}", refit.value.metadata.namespace, key.name);
        let name = |map: &Document<ConfigMap>| {
            format!("{}/{}", map.value.metadata.namespace, map.value.metadata.name)
        };
        let Some(map) = self.config_maps.iter().find(|map| name(map) == wanted) else {
            let given = self.config_maps.iter().map(name).collect();
            let problem = Problem::NotGiven { kind: "ConfigMap", name: wanted, given };
            return Err(refit.refuse(path.key("name"), problem));
        };
        if let Some(text) = map.value.data.get(&key.key) {
            return Ok(text.clone().into_bytes());
        }
        let Some(encoded) = map.value.binary_data.get(&key.key) else {
            let keys = map.value.data.keys().chain(map.value.binary_data.keys());
            let (name, key) = (key.name.clone(), key.key.clone());
            return Err(refit
                .refuse(path.key("key"), Problem::NoSuchKey { name, key, given: keys.cloned().collect() }));
        };
        decode(&key.key, encoded)
            .map_err(|problem| map.refuse(FieldPath::of("binaryData").entry(&key.key), problem))
    }
}

/// The one document of a file that is of our own making, read as strictly as the resource.
///
/// # Errors
/// With the first problem, such as that there are none or several documents.
pub fn only<T: DeserializeOwned>(source: &SourceText) -> Result<Document<T>, Refusal> {
    let mut nodes = nodes(source)?.into_iter();
    match (nodes.next(), nodes.next()) {
        (Some(node), None) => typed(&source.file, node),
        (first, second) => {
            let count = first.iter().count() + second.iter().count() + nodes.count();
            let problem = Problem::Length { what: "the file", unit: "documents", count, least: 1, most: 1 };
            Err(source.refuse(Unreadable { position: None, problem }))
        }
    }
}

/// The documents of a file as they are, whatever their kind.
///
/// # Errors
/// When the text is no YAML, or YAML readers would differ about it.
pub fn objects(source: &SourceText) -> Result<Vec<serde_json::Value>, Refusal> {
    Ok(nodes(source)?.into_iter().map(serde_json::Value::from).collect())
}

fn nodes(source: &SourceText) -> Result<Vec<Node>, Refusal> {
    let whole = |unreadable| source.refuse(unreadable);
    let nodes = Node::documents(&source.text).map_err(whole)?;
    nodes.iter().try_for_each(|node| node.refuse_ambiguous(&source.text)).map_err(whole)?;
    Ok(nodes)
}

fn typed<T: DeserializeOwned>(file: &str, node: Node) -> Result<Document<T>, Refusal> {
    match strict::from_node(&node) {
        Ok(value) => Ok(Document { file: file.to_owned(), value, node: Some(node) }),
        Err(located) => {
            let (path, position) = located.place.unwrap_or_else(|| (FieldPath::default(), node.position));
            Err(Refusal {
                file: file.to_owned(),
                position: Some(position),
                path,
                problem: located.problem.into(),
            })
        }
    }
}

fn once<T>(earlier: &[Document<T>], new: &Document<T>, of: impl Fn(&T) -> &Metadata) -> Result<(), Refusal> {
    let Metadata { namespace, name, .. } = of(&new.value);
    if earlier.iter().any(|old| of(&old.value).namespace == *namespace && of(&old.value).name == *name) {
        let problem = Problem::Duplicate(format!("{namespace}/{name}"));
        return Err(new.refuse(FieldPath::of("metadata.name"), problem));
    }
    Ok(())
}

/// Base64 to bytes, inflated when they are gzip.
fn decode(key: &str, encoded: &str) -> Result<Vec<u8>, Problem> {
    let undecodable = |reason: String| Problem::Undecodable { key: key.to_owned(), reason };
    let compact: String = encoded.split_ascii_whitespace().collect();
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(compact)
        .map_err(|error| undecodable(error.to_string().trim_end_matches('.').to_owned()))?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut inflated = Vec::new();
    let mut reader = flate2::read::MultiGzDecoder::new(bytes.as_slice()).take(limits::INFLATED_BYTES_MAX + 1);
    reader.read_to_end(&mut inflated).map_err(|error| undecodable(error.to_string()))?;
    if inflated.len() as u64 > limits::INFLATED_BYTES_MAX {
        return Err(Problem::TooLarge { key: key.to_owned(), bytes_max: limits::INFLATED_BYTES_MAX });
    }
    Ok(inflated)
}
