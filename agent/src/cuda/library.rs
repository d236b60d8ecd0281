//! A C library opened at run time; what its symbols are is for others to say.

use std::path::{Path, PathBuf};

/// An open library.
#[derive(Debug)]
pub struct Library {
    name: PathBuf,
    inner: libloading::Library,
}

/// A library cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It cannot be opened.
    #[error("cannot open {name}: {detail}")]
    Missing {
        /// The first name that was tried.
        name: String,
        /// What the loader says.
        detail: String,
    },
    /// It lacks a function without which nothing works.
    #[error("{library} has no function {symbol}")]
    Symbol {
        /// Where it was looked for.
        library: String,
        /// Its name.
        symbol: &'static str,
    },
}

impl Library {
    /// Opens `path`, or else the first of `names` that the loader finds.
    ///
    /// # Errors
    /// What the loader says of the first of them.
    pub fn open(path: Option<&Path>, names: &[&str]) -> Result<Self, LibraryError> {
        let names = match path {
            Some(path) => vec![path.to_owned()],
            None => names.iter().map(PathBuf::from).collect(),
        };
        let mut first = None;
        for name in names {
            // SAFETY: CUDA's driver and NCCL have initialisers that may run on any thread, and so does the double;
            // whoever can choose another file for the agent to load runs it as this user already.
            match unsafe { libloading::Library::new(&name) } {
                Ok(inner) => return Ok(Self { name, inner }),
                Err(error) => {
                    let detail = error.to_string();
                    first.get_or_insert(LibraryError::Missing { name: name.display().to_string(), detail });
                }
            }
        }
        Err(first.unwrap_or(LibraryError::Missing { name: String::new(), detail: "no name".into() }))
    }

    /// A function of this name, if there is one.
    ///
    /// # Safety
    /// `F` is the type of that function, and nobody calls it after this library is dropped.
    pub(crate) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Option<F> {
        // SAFETY: the caller names the type.
        unsafe { self.inner.get::<F>(symbol) }.ok().map(|found| *found)
    }

    /// The function, or the error that it is missing.
    ///
    /// # Safety
    /// As for [`Self::function`].
    pub(crate) unsafe fn required<F: Copy>(&self, symbol: &'static str) -> Result<F, LibraryError> {
        let missing = || LibraryError::Symbol { library: self.name.display().to_string(), symbol };
        // SAFETY: the caller's promise.
        unsafe { self.function(symbol) }.ok_or_else(missing)
    }
}

/// A table of functions: the library lives as long as its pointers, those after `optional` may be missing.
macro_rules! symbols {
    (
        $(#[$doc:meta])* $table:ident;
        required { $($name:ident = $symbol:literal ( $($argument:ty),* ) -> $result:ty;)* }
        optional { $($maybe:ident = $maybe_symbol:literal ( $($maybe_argument:ty),* ) -> $maybe_result:ty;)* }
    ) => {
        $(#[$doc])*
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
            _library: $crate::cuda::Library,
        }

        impl $table {
            pub(super) fn load(library: $crate::cuda::Library) -> Result<Self, $crate::cuda::LibraryError> {
                Ok(Self {
                    // SAFETY: the types are those of the library's header, and it is kept beside them.
                    $($name: unsafe { library.required($symbol) }?,)*
                    // SAFETY: as above.
                    $($maybe: unsafe { library.function($maybe_symbol) },)*
                    _library: library,
                })
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($table))
            }
        }
    };
}
pub(crate) use symbols;
