"""Compiled crates shared by checkouts: each runs its own code, and an unchanged one compiles nothing."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

FRESH = pathlib.Path(__file__).parent / "fresh.py"
MANIFEST = '[package]\nname = "weightrefit-tiny"\nversion = "0.1.0"\nedition = "2024"\n\n[workspace]\n'


class Shared(unittest.TestCase):
    """One folder of compiled crates, several checkouts of a program that prints one word."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.target = self.folder / "target"

    def checkout(self, name, word):
        """A clone whose program prints `word`."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)
        (root / "tests").mkdir(parents=True)
        (root / "src").mkdir()
        shutil.copy(FRESH, root / "tests")
        (root / "Cargo.toml").write_text(MANIFEST)
        self.edit(root, word)
        subprocess.run(["git", "init", "-q", root], check=True)
        return root

    def edit(self, root, word):
        (root / "src/main.rs").write_text(f'fn main() {{ println!("{word}") }}\n')

    def cargo(self, root, keep=True):
        """(what the program prints, how many crates were compiled for that); `keep`: with the note kept in step."""
        command = ["cargo", "run", "--release", "--offline"]
        if keep:
            command = [sys.executable, "tests/fresh.py", *command]
        env = dict(os.environ, CARGO_TARGET_DIR=str(self.target), CARGO_TERM_COLOR="never")
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split(), done.stderr.count("Compiling")

    def test_a_new_clone_of_what_was_compiled_compiles_nothing(self):
        for _ in range(2):
            root = self.checkout("clone", "one")
            seen = self.cargo(root)
        self.assertEqual(seen, (["one"], 0))

    def test_a_new_clone_compiles_what_differs(self):
        self.cargo(self.checkout("clone", "one"))
        self.assertEqual(self.cargo(self.checkout("clone", "two")), (["two"], 1))

    def test_a_checkout_older_than_the_crates_of_another_runs_its_own_code(self):
        first, second = self.checkout("first", "one"), self.checkout("second", "two")
        seen = [self.cargo(root)[0] for root in (second, first, second)]
        self.assertEqual(seen, [["two"], ["one"], ["two"]])

    def test_a_file_with_an_old_time_and_other_content_is_compiled(self):
        root = self.checkout("clone", "one")
        times = os.stat(root / "src/main.rs")
        self.cargo(root)
        self.edit(root, "two")
        os.utime(root / "src/main.rs", ns=(times.st_atime_ns, times.st_mtime_ns))
        self.assertEqual(self.cargo(root), (["two"], 1))

    def test_what_was_compiled_without_a_note_is_not_taken_for_a_clones(self):
        self.cargo(self.checkout("clone", "one"))
        self.cargo(self.checkout("clone", "two"), keep=False)
        self.assertEqual(self.cargo(self.checkout("clone", "one")), (["one"], 1))

    def test_an_edit_after_cargo_alone_compiles_only_what_it_touched(self):
        root = self.checkout("clone", "one")
        self.cargo(root)
        self.edit(root, "two")
        self.cargo(root, keep=False)
        self.assertEqual(self.cargo(root), (["two"], 0))


if __name__ == "__main__":
    unittest.main()
