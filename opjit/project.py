"""A hatchling build hook that adds a binary of each op for each architecture to the wheel of a project.

    [build-system]
    requires = ["hatchling", "opjit"]
    build-backend = "hatchling.build"

    [tool.hatch.build.targets.wheel.hooks.opjit]
    archs = ["x86-64-v3", "sm_90"]

Only the wheel uses the hook, so an sdist imports neither opjit nor torch. `opjit new --project
NAME` writes a project with this hook.
"""

import importlib
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilderConfig
from hatchling.plugin import hookimpl

from opjit.author import wheel
from opjit.catalog import registry
from opjit.errors import BadSetting, DeclarationError
from opjit.operators.op import Op

_TABLE = "[tool.hatch.build.targets.wheel.hooks.opjit]"


class OpBuildHook(BuildHookInterface[WheelBuilderConfig]):
    """Adds binaries to a wheel, and the platform tag that follows from them."""

    PLUGIN_NAME = "opjit"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the ops, unless the install is editable.

        Raises BadSetting without archs, DeclarationError without ops, and the errors of a build."""
        if self.target_name != "wheel" or version == "editable":
            return
        found = {package: _ops(Path(self.root, package)) for package in self.build_config.packages}
        ops = [op for each in found.values() for op in each]
        if not ops:
            raise DeclarationError(
                f"no op is declared in {', '.join(found) or 'any package of the wheel'}; call "
                "opjit.add_path(Path(__file__).parent) in the package's __init__.py"
            )
        targets = wheel.targets_for(ops, self._archs())
        self._staged = TemporaryDirectory(prefix="opjit-wheel-")
        staged = Path(self._staged.name)
        for package, each in found.items():
            wheel.add_binaries(each, targets, Path(self.root, package).resolve(), staged / package)
        files = (file for file in staged.rglob("*") if file.is_file())
        build_data["force_include"].update(
            {str(file): str(file.relative_to(staged)) for file in files}
        )
        build_data.update(wheel.binary_tag(staged))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel" and version != "editable":
            self._staged.cleanup()

    def _archs(self) -> list[str]:
        chosen = os.environ.get("OPJIT_WHEEL_ARCHS", "").replace(" ", "")
        archs = chosen.split(",") if chosen else self.config.get("archs")
        if not isinstance(archs, list):
            raise BadSetting(
                f'expected a list of archs in {_TABLE}, such as archs = ["x86-64-v3", "sm_90"], got {self.config}'
            )
        return archs


def _ops(package: Path) -> list[Op]:
    if not (package / "__init__.py").is_file():
        raise DeclarationError(
            f"expected a package in {package}, with an __init__.py that declares its ops"
        )
    sys.path.insert(0, str(package.parent))  # an op.py may import from its package
    try:
        importlib.import_module(package.name)
    finally:
        sys.path.remove(str(package.parent))
    return [op for op in registry.all_ops() if op.folder.is_relative_to(package.resolve())]


@hookimpl
def hatch_register_build_hook() -> type[OpBuildHook]:
    return OpBuildHook
