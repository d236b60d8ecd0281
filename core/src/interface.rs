//! Which network interfaces a library may use, as it reads the variable that tells it.

/// A library, and how it reads its variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `NCCL_SOCKET_IFNAME`: beginnings of names, whole names after `=`, all but these after `^`; a port after `:` says
    /// nothing here. A value of fewer than two bytes is none.
    Nccl,
    /// `GLOO_SOCKET_IFNAME`, as PyTorch reads it: whole names, each of which must be there. A value of fewer than two
    /// bytes is none.
    Gloo,
}

/// Whether the library, told `value`, finds an interface among those `present` by which other pods can reach it. The
/// loopback counts only where it is asked for by name: a list of what must not be used leaves it over.
#[must_use]
pub fn finds(library: Library, value: &str, present: &[String]) -> bool {
    if value.len() < 2 {
        return true; // it chooses by itself
    }
    match library {
        Library::Nccl => nccl(value, present),
        Library::Gloo => value.split(',').all(|name| present.iter().any(|link| link == name)),
    }
}

fn nccl(value: &str, present: &[String]) -> bool {
    let (excludes, list) = value.strip_prefix('^').map_or((false, value), |list| (true, list));
    let (whole, list) = list.strip_prefix('=').map_or((false, list), |list| (true, list));
    let names = || list.split(',').filter_map(|name| name.split(':').next()).filter(|name| !name.is_empty());
    let is_named = |link: &str| {
        let fits = |name: &str| if whole { link == name } else { link.starts_with(name) };
        names().next().is_none() || names().any(fits) // a list without names names all
    };
    present.iter().any(|link| is_named(link) != excludes && !(excludes && link == "lo"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_finds_what_its_variable_leaves_it() {
        let present = ["lo", "eth0", "ens1f0"].map(str::to_owned);
        // What is said, and whether NCCL and Gloo find something.
        for (value, nccl, gloo) in [
            ("", true, true),
            ("=", true, true),
            ("eth0", true, true),
            ("eth", true, false),
            ("=eth0", true, false),
            ("=eth", false, false),
            ("lo", true, true),
            ("ib", false, false),
            ("ib0,ens1", true, false),
            ("ib0,ens1f0", true, false),
            ("eth0,ens1f0", true, true),
            ("ib0,,", false, false),
            (",,", true, false),
            ("=ens1f0:4791", true, false),
            ("^docker0,lo", true, false),
            ("^docker", true, false),
            ("^eth", true, false),
            ("^e", false, false),
            ("^eth,ens", false, false),
            ("^=eth0,ens1f0", false, false),
            ("^=eth,ens", true, false),
            ("^,", false, false),
        ] {
            let found = [Library::Nccl, Library::Gloo].map(|library| finds(library, value, &present));
            assert_eq!(found, [nccl, gloo], "{value}");
        }
        assert!(!finds(Library::Nccl, "^eth", &present[..2]), "the loopback alone");
    }
}
