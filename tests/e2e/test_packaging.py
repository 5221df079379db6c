"""What users install: the packages, the wheel, the commands; and what an import brings with it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import weightcast

PACKAGE_FOLDERS = ("adapters", "cluster", "commands", "demo", "gateway", "offline", "transfer")
NOT_SHIPPED = ("tests", "benchmarks", "examples", "docs", "requirements", "sgl_kernel", "sglang_cpu_shims", "deep_ep")

# Modules that may import torch when they are imported; every other module must work where torch is not installed.
NEED_TORCH = (
    "weightcast.adapters",
    "weightcast.cluster.trainer_rank",
    "weightcast.demo.colocated",
    "weightcast.demo.machines",
    "weightcast.demo.megatron_training",
    "weightcast.demo.megatron_weights",
    "weightcast.demo.model",
    "weightcast.demo.reference",
    "weightcast.demo.run",
    "weightcast.demo.trainer",
    "weightcast.demo.training",
    "weightcast.gateway.ranks.digests",
    "weightcast.gateway.ranks.instance",
    "weightcast.gateway.ranks.membership",
    "weightcast.gateway.ranks.trainer",
    "weightcast.transfer.colocated.cuda_ipc",
    "weightcast.transfer.colocated.exporter",
    "weightcast.transfer.colocated.host_memory",
    "weightcast.transfer.colocated.importer",
    "weightcast.transfer.colocated.peers",
    "weightcast.transfer.colocated.sharing",
    "weightcast.transfer.copy.batch",
    "weightcast.transfer.copy.nan",
    "weightcast.transfer.copy.runs",
    "weightcast.transfer.digest.boxes",
    "weightcast.transfer.digest.cpu_loops",
    "weightcast.transfer.digest.cpu_scan",
    "weightcast.transfer.digest.definition",
    "weightcast.transfer.digest.digester",
    "weightcast.transfer.digest.gpu_kernel",
    "weightcast.transfer.digest.values",
    "weightcast.transfer.exchange.messages_in_memory",
    "weightcast.transfer.exchange.schedule",
    "weightcast.transfer.executor",
    "weightcast.transfer.transports",
)

# An import of a module below the package.
DEEP = re.compile(r" *(from|import) weightcast\.")

# Modules that nothing may import by accident, with or without torch.
HEAVY = ("torch", "ray", "sglang", "vllm", "transformers", "megatron")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def source_files(root: Path) -> list[Path]:
    """Every file of code that belongs to the package."""
    return [*root.glob("*.py"), *(file for folder in PACKAGE_FOLDERS for file in (root / folder).rglob("*.py"))]


def modules(root: Path) -> list[str]:
    """Names of all modules of the package."""
    names = (".".join(("weightcast", *file.relative_to(root).with_suffix("").parts)) for file in source_files(root))
    return sorted(name.removesuffix(".__init__") for name in names)


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, without what the caller's environment adds to Python's path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def import_without(blocked: tuple[str, ...], names: list[str], root: Path, tmp_path: Path) -> str:
    """Import modules in a new process in which importing one of `blocked` fails; says what they loaded of HEAVY."""
    parent = tmp_path / "src"
    parent.mkdir()
    (parent / "weightcast").symlink_to(root)
    program = f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked by the test: " + name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {str(parent)!r})
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{{name}}: {{error}}")
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    return run(sys.executable, "-c", program, cwd=tmp_path).strip()


def test_every_package_folder_is_listed(project: dict[str, Any], root: Path) -> None:
    folders = {file.parent for folder in PACKAGE_FOLDERS for file in (root / folder).rglob("__init__.py")}
    found = {".".join(("weightcast", *folder.relative_to(root).parts)) for folder in folders}
    assert sorted(found | {"weightcast"}) == sorted(project["tool"]["setuptools"]["packages"])


def test_every_folder_with_code_is_a_package(root: Path) -> None:
    folders = {file.parent for folder in PACKAGE_FOLDERS for file in (root / folder).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_entry_points_resolve(project: dict[str, Any], root: Path) -> None:
    plugin = project["project"]["entry-points"]["sglang.srt.plugins"]
    assert plugin == {"weightcast": "weightcast.adapters.sglang.plugin:register"}
    assert project["project"]["scripts"] == {"weightcast": "weightcast.cli:main"}
    for target in (*plugin.values(), *project["project"]["scripts"].values()):
        assert callable(EntryPoint("weightcast", target, "").load())


def test_importing_the_package_is_light(root: Path, tmp_path: Path) -> None:
    assert import_without((), ["weightcast"], root, tmp_path) == ""


def test_modules_work_without_torch(root: Path, tmp_path: Path) -> None:
    light = [name for name in modules(root) if not name.startswith(NEED_TORCH)]
    assert "weightcast.transfer.plan.operations" in light
    assert import_without(HEAVY, light, root, tmp_path) == ""


def test_no_module_imports_an_engine_when_imported(root: Path, tmp_path: Path) -> None:
    engines = tuple(name for name in HEAVY if name != "torch")
    assert import_without(engines, modules(root), root, tmp_path) in ("", "torch")


def exported(tree: ast.Module) -> list[str] | None:
    """The module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names that the module's top level binds."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def constants_classes_functions(name: str) -> tuple[int, str]:
    """The order of `__all__`: constants, then classes, then functions, each by name."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_exports_are_sorted_and_defined(root: Path) -> None:
    lazy = root / "__init__.py"  # see the test of the public face
    trees = {file: ast.parse(file.read_text()) for file in source_files(root) if file != lazy}
    exports = {file.relative_to(root): names for file, tree in trees.items() if (names := exported(tree)) is not None}
    assert len(exports) >= 4
    unsorted = [file for file, names in exports.items() if names != sorted(set(names), key=constants_classes_functions)]
    assert unsorted == []
    undefined = {str(file): sorted(set(names) - defined(trees[root / file])) for file, names in exports.items()}
    assert {file: names for file, names in undefined.items() if names} == {}


@pytest.fixture(scope="module")
def distributions(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from what it holds."""
    folder = tmp_path_factory.mktemp("distributions")

    def left_out(path: str, names: list[str]) -> set[str]:
        generated = {".git", "build", "dist", "__pycache__"} & set(names)
        return generated | {name for name in names if Path(path, name, "pyvenv.cfg").exists()}

    shutil.copytree(root, folder / "tree", ignore=left_out, symlinks=True)
    backend = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
    run(sys.executable, "-c", backend.format("sdist"), folder, cwd=folder / "tree")
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-c", backend.format("wheel"), folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    [wheel] = folder.glob("*.whl")
    return sdist, wheel


def test_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path], root: Path) -> None:
    names = zipfile.ZipFile(distributions[1]).namelist()
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    code = {f"weightcast/{file.relative_to(root).as_posix()}" for file in source_files(root)}
    assert set(names) - metadata == code | {"weightcast/py.typed"}
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_nothing_of_the_test_environment_is_shipped(distributions: tuple[Path, Path]) -> None:
    for name in zipfile.ZipFile(distributions[1]).namelist():
        assert not set(NOT_SHIPPED) & set(Path(name).parts), name
        assert not name.endswith(".pth"), name


def test_source_distribution_can_run_the_tests(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "README.md", "tests/conftest.py", "tests/support/spawn_support.py"} <= names
    assert {"requirements/torch.txt", "requirements/install_torch.sh", "tests/sglang_cpu/sglang_cpu_shims.pth"} <= names


def test_the_public_face_is_sorted_lazy_and_whole(tmp_path: Path) -> None:
    """Each name is what its module defines, and is found by `dir`; nothing is loaded before it is asked for."""
    program = f"import sys, weightcast; print(*[name for name in sys.modules if name in {HEAVY!r}])"
    assert run(sys.executable, "-c", program, cwd=tmp_path).strip() == ""
    assert weightcast.__all__ == sorted(weightcast.__all__, key=lambda name: (name.islower(), name))
    assert set(weightcast.__all__) == set(weightcast._HOMES) <= set(dir(weightcast))
    for name in weightcast.__all__:
        assert getattr(weightcast, name).__module__ == f"weightcast.{weightcast._HOMES[name]}"
    with pytest.raises(AttributeError, match="'weightcast' has no attribute 'Fsdp'"):
        weightcast.Fsdp  # noqa: B018


def test_examples_and_readme_use_the_public_face_alone(root: Path) -> None:
    texts = {file: file.read_text() for file in [*(root / "examples").glob("*.py"), root / "README.md"]}
    deep = [f"{file.name}: {line}" for file, text in texts.items() for line in text.splitlines() if DEEP.match(line)]
    assert len(texts) > 5
    assert not deep


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel in it; what it depends on is read from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", distributions[1], cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_installed_package_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = (
        "import weightcast, weightcast.transfer.plan.operations as plan; print(weightcast.__version__, plan.__file__)"
    )
    version, file = run(installed / "python", "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert version.count(".") == 2


@pytest.mark.parametrize("command", [("python", "-m", "weightcast"), ("weightcast",)], ids=["module", "script"])
def test_installed_command_helps(installed: Path, root: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    text = run(installed / command[0], *command[1:], "--help", cwd=tmp_path)
    assert text.startswith("usage: weightcast")
    assert "plan" in text
