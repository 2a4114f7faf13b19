"""The reports of a build's tools."""

from pathlib import Path

from opjit import files
from opjit.recipe.reads import Moment
from opjit.recipe.reports import ReportReader, Search


def test_a_compilation_without_a_list_of_files_is_in_doubt(tmp_path: Path) -> None:
    reader = ReportReader(str(tmp_path), str(tmp_path), Moment(), (), (), files.tick(tmp_path))
    read = reader.compiled([], [], Search((), ()))
    assert read.doubt == "the compiler does not list the files that it reads"
