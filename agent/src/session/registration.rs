//! Registrations: pages put together, and compared with what the layout says the rank stores.

use crate::limits;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::layout::recording::{self, RecordedPiece, RecordedTensor};
use weightrefit_core::membership::Seat;
use weightrefit_core::model::TensorTable;
use weightrefit_core::region::{LocalTensor, RankRegions};
use weightrefit_proto::socket::{Group, Memory, Tensor};
use weightrefit_proto::v1::{Claim, Recorded};

/// What a client registered, all pages of it.
#[derive(Debug, Default)]
pub struct Registration {
    /// What is claimed and the descriptor, trainers only; nothing of it is checked yet.
    pub memories: Vec<(Memory, OwnedFd)>,
    /// In the client's order.
    pub tensors: Vec<Tensor>,
    /// UUID of the GPU on which an engine wants its staging; `None` is memory of the host.
    pub staging_device: Option<String>,
    /// What an engine processes together, in its order; empty where it does not say.
    pub groups: Vec<Group>,
}

/// A registration that cannot be taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// Pages come in order, each once.
    #[error("page {got} of {pages} came where page {expected} of {expected_pages} is due")]
    Page {
        /// Number in the frame.
        got: u32,
        /// Pages in the frame.
        pages: u32,
        /// Number due.
        expected: u32,
        /// Pages that the first page announced.
        expected_pages: u32,
    },
    /// Every memory brings its descriptor.
    #[error("page lists {memories} memories and carries {fds} descriptors")]
    Descriptors {
        /// Listed.
        memories: usize,
        /// Attached.
        fds: usize,
    },
    /// Groups have all tensors of a page, or there are none on any page.
    #[error("groups of page {page} have {grouped} of its {tensors} tensors")]
    Groups {
        /// Number of the page.
        page: u32,
        /// In groups.
        grouped: u64,
        /// On the page.
        tensors: usize,
    },
    /// A group has a tensor, and a name of its own.
    #[error("group `{name}` {what}")]
    Group {
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Too much.
    #[error("registration has more than {max} {what}")]
    TooMany {
        /// Pages, tensors or memories.
        what: &'static str,
        /// How many are allowed.
        max: usize,
    },
    /// Not what the layout says; up to five differences, and how many there are.
    #[error("registration differs from the layout in {count} places: {}", .first.join("; "))]
    Differs {
        /// One sentence each.
        first: Vec<String>,
        /// All of them.
        count: usize,
    },
}

impl RegistrationError {
    /// The stable code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Page { .. }
            | Self::Descriptors { .. }
            | Self::Groups { .. }
            | Self::Group { .. }
            | Self::TooMany { .. } => Code::Unsupported,
            Self::Differs { .. } => Code::RegistrationMismatch,
        }
    }
}

/// A registration on its way in.
#[derive(Debug, Default)]
pub(super) struct Pages {
    next: u32,
    pages: u32,
    gathered: Registration,
    names: BTreeSet<String>,
}

impl Pages {
    /// Adds a page; yields the registration after the last one and starts over.
    pub(super) fn add(
        &mut self,
        (page, pages): (u32, u32),
        memories: Vec<Memory>,
        (tensors, groups): (Vec<Tensor>, Vec<Group>),
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Registration>, RegistrationError> {
        if self.next == 0 {
            self.pages = pages;
        }
        if page != self.next || pages != self.pages || page >= pages {
            let (expected, expected_pages) = (self.next, self.pages);
            return Err(RegistrationError::Page { got: page, pages, expected, expected_pages });
        }
        if memories.len() != fds.len() {
            return Err(RegistrationError::Descriptors { memories: memories.len(), fds: fds.len() });
        }
        let all = &mut self.gathered;
        let bounds = [
            ("pages", pages as usize, limits::REGISTRATION_PAGES_MAX),
            ("tensors", all.tensors.len() + tensors.len(), limits::REGISTRATION_TENSORS_MAX),
            ("memories", all.memories.len() + memories.len(), limits::REGISTRATION_MEMORIES_MAX),
        ];
        if let Some(&(what, _, max)) = bounds.iter().find(|(_, count, max)| count > max) {
            return Err(RegistrationError::TooMany { what, max });
        }
        let grouped = groups.iter().map(|group| u64::from(group.tensors)).sum::<u64>();
        let none = groups.is_empty() && all.groups.is_empty();
        let whole = grouped == tensors.len() as u64 && all.groups.is_empty() == all.tensors.is_empty();
        if !none && !whole {
            return Err(RegistrationError::Groups { page, grouped, tensors: tensors.len() });
        }
        for group in &groups {
            let what = match group.tensors {
                0 => "has no tensor",
                _ if !self.names.insert(group.name.clone()) => "comes twice",
                _ => continue,
            };
            return Err(RegistrationError::Group { name: group.name.clone(), what });
        }
        all.groups.extend(groups);
        all.memories.extend(memories.into_iter().zip(fds));
        all.tensors.extend(tensors);
        self.next += 1;
        Ok((self.next == self.pages).then(|| std::mem::take(self).gathered))
    }
}

/// What a client has recorded, for the coordinator: pages of about [`limits::RECORDED_PAGE_BYTES`], and `None`
/// where it recorded nothing.
#[must_use]
pub fn recorded(registration: &Registration, seat: &Seat) -> Option<Arc<[Recorded]>> {
    let tensors = registration.tensors.iter().map(|tensor| {
        let Tensor { name, dtype, shape, pieces, .. } = tensor.clone();
        Some(RecordedTensor { name, dtype, shape, pieces: pieces? })
    });
    let tensors: Vec<RecordedTensor> = tensors.collect::<Option<_>>()?;
    let mut lists: Vec<Vec<u8>> = Vec::new();
    for tensor in &tensors {
        let text = serde_json::to_vec(tensor).expect("names and numbers are JSON");
        match lists.last_mut().filter(|list| list.len() < limits::RECORDED_PAGE_BYTES) {
            Some(list) => list.push(b','),
            None => lists.push(vec![b'[']),
        }
        lists.last_mut()?.extend(text);
    }
    let pages = u32::try_from(lists.len()).ok().filter(|pages| *pages > 0)?;
    let page = |(page, mut tensors): (u32, Vec<u8>)| {
        tensors.push(b']');
        Recorded { claim: Some(Claim::from(seat)), page, pages, tensors }
    };
    Some((0..).zip(lists).map(page).collect())
}

/// Most differences that are spelled out: enough to see the pattern, few enough to read.
const DIFFERENCES_SHOWN: usize = 5;

/// Compares what was registered with the rank's local tensors (sorted by name).
///
/// # Errors
/// [`RegistrationError::Differs`] with the first five differences: layout order, then what is too much.
pub fn compare(registered: &[Tensor], layout: &[LocalTensor]) -> Result<(), RegistrationError> {
    compare_with(registered, layout, &[])
}

/// As [`compare`], and the pieces too, where the client recorded them.
///
/// # Errors
/// As [`compare`].
pub fn compare_recorded(
    registered: &[Tensor],
    regions: &RankRegions,
    table: &TensorTable,
) -> Result<(), RegistrationError> {
    let with_pieces = registered.iter().any(|tensor| tensor.pieces.is_some());
    let recorded = if with_pieces { recording::record(regions, table) } else { Vec::new() };
    compare_with(registered, &regions.locals, &recorded)
}

/// `recorded` is the layout as recorded, by the same indices; empty where no pieces are registered.
fn compare_with(
    registered: &[Tensor],
    layout: &[LocalTensor],
    recorded: &[RecordedTensor],
) -> Result<(), RegistrationError> {
    let mut given: Vec<&Tensor> = registered.iter().collect();
    given.sort_by(|a, b| a.name.cmp(&b.name));
    let mut differences = Vec::new();
    for pair in given.windows(2).filter(|pair| pair[0].name == pair[1].name) {
        differences.push(format!("`{}` is registered twice", pair[0].name));
    }
    for (index, want) in layout.iter().enumerate() {
        match given.binary_search_by(|tensor| tensor.name.cmp(&want.name)) {
            Err(_) => differences.push(format!("`{}` is missing", want.name)),
            Ok(at) => {
                let pieces = || piece_difference(given[at], &recorded.get(index)?.pieces);
                differences.extend(difference(given[at], want).or_else(pieces));
            }
        }
    }
    for tensor in given {
        // A rank to which a layout gives no expert of a stack has no such tensor; its client may, without an element.
        let is_empty = tensor.shape.contains(&0);
        if !is_empty && layout.binary_search_by(|local| local.name.cmp(&tensor.name)).is_err() {
            differences.push(format!("`{}` is not in the layout", tensor.name));
        }
    }
    let count = differences.len();
    differences.truncate(DIFFERENCES_SHOWN);
    if count == 0 { Ok(()) } else { Err(RegistrationError::Differs { first: differences, count }) }
}

fn difference(given: &Tensor, want: &LocalTensor) -> Option<String> {
    if given.shape != want.shape {
        Some(format!("`{}` has shape {:?}, the layout says {:?}", want.name, given.shape, want.shape))
    } else if given.dtype != want.dtype {
        Some(format!("`{}` is stored as {}, the layout says {}", want.name, given.dtype, want.dtype))
    } else {
        None
    }
}

fn piece_difference(given: &Tensor, want: &[RecordedPiece]) -> Option<String> {
    let mut recorded = given.pieces.clone()?;
    recording::normalize(&mut recorded);
    let show = |piece: &RecordedPiece| {
        let lead = piece.lead.map(|lead| format!(" at index {lead}")).unwrap_or_default();
        format!("`{}`{lead} as {:?}", piece.tensor, piece.dims)
    };
    let differ = |(a, b): (&RecordedPiece, &RecordedPiece)| {
        (a != b).then(|| format!("holds {}, the layout says {}", show(a), show(b)))
    };
    let first = recorded.iter().zip(want).find_map(differ).or_else(|| {
        let more =
            recorded.get(want.len()).map(|piece| format!("holds {} and the layout does not", show(piece)));
        more.or_else(|| {
            Some(format!("does not hold {}, as the layout says", show(want.get(recorded.len())?)))
        })
    });
    first.map(|what| format!("`{}` {what}", given.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::dtype::DType;
    use weightrefit_proto::socket::GroupClass;

    fn tensor(name: &str, dtype: DType, shape: &[u64]) -> Tensor {
        Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), at: None, pieces: None }
    }

    fn local(name: &str, dtype: DType, shape: &[u64]) -> LocalTensor {
        LocalTensor { name: name.to_owned(), dtype, shape: shape.to_vec() }
    }

    #[test]
    fn differences_are_named_and_counted() {
        let layout =
            [local("a", DType::F32, &[2, 3]), local("b", DType::Bf16, &[4]), local("c", DType::F32, &[])];
        let fits =
            [tensor("c", DType::F32, &[]), tensor("a", DType::F32, &[2, 3]), tensor("b", DType::Bf16, &[4])];
        assert_eq!(compare_with(&fits, &layout, &[]), Ok(()));
        let rows: [(&[Tensor], &str); 5] = [
            (&fits[..2], "1 places: `b` is missing"),
            (
                &[fits[0].clone(), fits[1].clone(), tensor("b", DType::F16, &[4])],
                "1 places: `b` is stored as f16, the layout says bf16",
            ),
            (
                &[fits[0].clone(), fits[1].clone(), tensor("b", DType::Bf16, &[5])],
                "1 places: `b` has shape [5], the layout says [4]",
            ),
            (
                &[fits[0].clone(), fits[1].clone(), fits[2].clone(), fits[2].clone()],
                "1 places: `b` is registered twice",
            ),
            (
                &[fits[0].clone(), fits[1].clone(), fits[2].clone(), tensor("d", DType::U8, &[1])],
                "1 places: `d` is not in the layout",
            ),
        ];
        for (given, want) in rows {
            let error = compare_with(given, &layout, &[]).expect_err(want);
            assert_eq!(error.code(), Code::RegistrationMismatch);
            assert!(error.to_string().ends_with(want), "{error}");
        }
        let empty = [&fits[..], &[tensor("experts", DType::U8, &[0, 4])]].concat();
        assert_eq!(compare(&empty, &layout), Ok(()), "no element is too much");
        let many: Vec<_> = (0..9).map(|n| tensor(&format!("x{n}"), DType::U8, &[])).collect();
        let Err(RegistrationError::Differs { first, count }) = compare_with(&many, &[], &[]) else {
            panic!()
        };
        assert_eq!((first.len(), count), (5, 9));
    }

    #[test]
    fn pages_come_in_order_and_each_once() {
        let mut pages = Pages::default();
        let page = |at| (at, vec![], (vec![tensor(&format!("t{at}"), DType::U8, &[])], vec![]));
        let (at, memories, tensors) = page(0);
        assert!(pages.add((at, 2), memories, tensors, vec![]).expect("first").is_none());
        for (at, of) in [(0, 2), (2, 2), (1, 3)] {
            let error = pages.add((at, of), vec![], (vec![], vec![]), vec![]).expect_err("out of order");
            assert!(
                matches!(error, RegistrationError::Page { expected: 1, expected_pages: 2, .. }),
                "{error}"
            );
        }
        let (at, memories, tensors) = page(1);
        let whole = pages.add((at, 2), memories, tensors, vec![]).expect("last").expect("whole");
        assert_eq!(whole.tensors.len(), 2);
        assert!(pages.add((0, 1), vec![], (vec![], vec![]), vec![]).expect("again").is_some());
    }

    #[test]
    fn groups_have_every_tensor_once() {
        let group = |name: &str, tensors| Group { name: name.to_owned(), class: GroupClass::Apply, tensors };
        let some = |count| (0..count).map(|n| tensor(&format!("t{n}"), DType::U8, &[])).collect::<Vec<_>>();
        let add = |pages: [(usize, Vec<Group>); 2]| {
            let mut all = Pages::default();
            let mut last = Ok(None);
            for (at, (count, groups)) in (0..).zip(pages) {
                last = all.add((at, 2), vec![], (some(count), groups), vec![]);
                if last.is_err() {
                    break;
                }
            }
            last.map(|whole| whole.expect("whole").groups.len()).map_err(|error| error.to_string())
        };
        assert_eq!(add([(3, vec![group("a", 2), group("b", 1)]), (1, vec![group("c", 1)])]), Ok(3));
        assert_eq!(add([(3, vec![]), (1, vec![])]), Ok(0));
        let rows = [
            ([(3, vec![group("a", 2)]), (1, vec![])], "groups of page 0 have 2 of its 3 tensors"),
            ([(1, vec![group("a", 1)]), (1, vec![])], "groups of page 1 have 0 of its 1 tensors"),
            ([(1, vec![]), (1, vec![group("a", 1)])], "groups of page 1 have 1 of its 1 tensors"),
            ([(1, vec![group("a", 1)]), (1, vec![group("a", 1)])], "group `a` comes twice"),
            ([(1, vec![group("a", 1), group("b", 0)]), (0, vec![])], "group `b` has no tensor"),
        ];
        for (pages, want) in rows {
            assert_eq!(add(pages).expect_err(want), want);
        }
    }

    #[test]
    fn memories_and_descriptors_are_as_many() {
        let memories = vec![Memory { bytes: 1, device: None }];
        let error = Pages::default().add((0, 1), memories, (vec![], vec![]), vec![]);
        assert_eq!(error.expect_err("refused"), RegistrationError::Descriptors { memories: 1, fds: 0 });
        let error =
            Pages::default().add((0, u32::MAX), vec![], (vec![], vec![]), vec![]).expect_err("refused");
        assert!(matches!(error, RegistrationError::TooMany { what: "pages", .. }), "{error}");
    }

    #[test]
    fn recorded_pieces_are_those_of_the_layout() {
        let piece = |tensor: &str, lead, run| RecordedPiece {
            tensor: tensor.to_owned(),
            lead,
            dims: vec![run],
            permute: None,
        };
        let layout = [local("qk", DType::F32, &[8])];
        let want = [RecordedTensor {
            name: "qk".to_owned(),
            dtype: DType::F32,
            shape: vec![8],
            pieces: vec![piece("k", None, vec![(4, 4, 4)]), piece("q", None, vec![(0, 0, 4)])],
        }];
        let with = |pieces: &[RecordedPiece]| {
            let registered = Tensor { pieces: Some(pieces.to_vec()), ..tensor("qk", DType::F32, &[8]) };
            compare_with(&[registered], &layout, &want).map_err(|error| error.to_string())
        };
        let in_halves = piece("q", None, vec![(0, 0, 2), (2, 2, 2)]);
        assert_eq!(
            with(&[in_halves, want[0].pieces[0].clone()]),
            Ok(()),
            "order and cuts of runs do not count"
        );
        let rows = [
            (
                vec![piece("q", None, vec![(0, 0, 4)])],
                "`qk` holds `q` as [[(0, 0, 4)]], the layout says `k` as [[(4, 4, 4)]]",
            ),
            (
                vec![piece("k", None, vec![(4, 4, 4)])],
                "`qk` does not hold `q` as [[(0, 0, 4)]], as the layout says",
            ),
            (
                vec![want[0].pieces[0].clone(), piece("q", None, vec![(0, 4, 4)])],
                "`qk` holds `q` as [[(0, 4, 4)]], the layout says `q` as [[(0, 0, 4)]]",
            ),
            (
                vec![
                    want[0].pieces[0].clone(),
                    want[0].pieces[1].clone(),
                    piece("v", Some(1), vec![(0, 0, 4)]),
                ],
                "`qk` holds `v` at index 1 as [[(0, 0, 4)]] and the layout does not",
            ),
        ];
        for (given, message) in rows {
            let error = with(&given).expect_err(message);
            assert!(error.ends_with(message), "{error}");
        }
    }
}
