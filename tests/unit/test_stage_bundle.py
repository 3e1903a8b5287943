"""Bundles: what is in them, built once, what nodes are told to use, and archives that come back as they were."""

import io
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks.errors import DataError, EnvironmentNotAble, SpecError
from allranks.nodes.staging import bundles, node
from allranks.nodes.staging.bundles import pack, package_conflicts, parse_release
from allranks.nodes.staging.manifests import NodeStage, StageManifest, for_node, load_manifest, node_stage, spec_here
from allranks.nodes.staging.node import Refused, identity, unpack
from allranks.nodes.staging.sources import brings_packages, environment_source, package_source, project_source
from allranks.rundir.checkpoints import file_hash
from allranks.spec import parse_spec
from allranks.spec.records import RunSpec
from tests.warm import allranks

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def spec_of(tmp_path: Path, **values: object) -> RunSpec:
    base = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}
    return parse_spec({**base, "cluster": {"cache": str(tmp_path / "cache")}, **values})


def rows(path: Path, text: str = "a") -> Path:
    path.write_text(json.dumps({"text": text}) + "\n")
    return path


def names_in(part: bundles.BundlePart) -> list[str]:
    with tarfile.open(part.archive) as tar:
        return tar.getnames()


def test_a_bundle_is_built_once_and_changes_with_its_content(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl")
    spec = spec_of(tmp_path, data={"source": str(data)})
    first, again = (bundles.build(spec, packages=False) for _ in range(2))
    assert [p.how for p in (*first.parts, *again.parts)] == ["built", "built", "found", "found"]
    assert again.key == first.key and bundles.load_bundle(Path(first.file)).key == first.key
    names = names_in(first.parts[0])
    assert {"allranks/cli/main.py", "allranks/spec/builtin/news.json"} <= set(names)
    assert names_in(first.parts[1]) == ["rows.jsonl"] and not [name for name in names if name.endswith(".pyc")]
    assert Path(first.file).parents[1].stat().st_mode & 0o777 == 0o700
    rows(data, "b")  # the same size
    other = bundles.build(spec, packages=False)
    assert [p.how for p in other.parts] == ["found", "built"] and other.key != first.key


def test_parts_that_nobody_used_for_a_month_are_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    project = tmp_path / "project"
    project.mkdir()
    for text in ("1", "2", "3"):
        (project / "a.py").write_text(text)
        made = bundles.assemble([project_source(project / "a.py")], store, {})
    (store / "mine").mkdir()
    (store / f"data-2-{'0' * 24}").mkdir()
    for entry in store.iterdir():
        os.utime(entry, (1, 1))
    again = bundles.assemble([project_source(project / "a.py")], store, {})
    assert again.parts[0].how == "found" and again.key == made.key
    assert {p.name for p in store.iterdir()} == {Path(again.parts[0].archive).parent.name, "bundles", "mine"}


def test_a_damaged_archive_is_built_anew(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    first = bundles.build(spec, packages=False)
    archive = Path(first.parts[0].archive)
    content = bytearray(archive.read_bytes())
    content[1000] ^= 1
    archive.write_bytes(content)
    again = bundles.build(spec, packages=False)
    assert again.parts[0].how == "rebuilt" and again.key == first.key


def test_packages_are_known_by_their_records(tmp_path: Path) -> None:
    site = fake_site(tmp_path / "site")
    source = environment_source(site)
    assert source.probe == ("fake-1.0.dist-info/RECORD",)
    assert all(name.startswith("lib/python3.") for name, _ in source.files)
    first = bundles.assemble([source], tmp_path / "store", {})
    (site / "allranks-9.dist-info").mkdir()  # installed anew: it is a part by itself
    (site / "allranks-9.dist-info" / "RECORD").write_text("x")
    (site / "_editable_impl_allranks.pth").write_text("/x")
    assert environment_source(site) == source
    assert bundles.assemble([source], tmp_path / "store", {}).parts[0].how == "found"
    (site / "fake-1.0.dist-info" / "RECORD").write_text("fake/__init__.py,sha256=other,9\n")
    assert bundles.assemble([source], tmp_path / "store", {}).parts[0].how == "built"
    assert first.python.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(EnvironmentNotAble, match="no installed packages"):
        environment_source(tmp_path)


def test_environments_that_packages_alone_do_not_make_are_refused(tmp_path: Path) -> None:
    site = fake_site(tmp_path / "site")
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    assert environment_source(site, tmp_path).files
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    with pytest.raises(EnvironmentNotAble, match="without --system-site-packages"):
        environment_source(site, tmp_path)
    (tmp_path / "conda-meta").mkdir()
    with pytest.raises(EnvironmentNotAble, match="conda environment"):
        environment_source(site, tmp_path)
    assert brings_packages(None) and brings_packages(sys.prefix) and not brings_packages("image.sif")
    with pytest.raises(EnvironmentNotAble, match="not the current environment"):
        brings_packages(str(tmp_path))


def fake_site(site: Path) -> Path:
    (site / "fake").mkdir(parents=True)
    (site / "fake" / "__init__.py").write_text("VALUE = 1\n")
    (site / "fake-1.0.dist-info").mkdir()
    (site / "fake-1.0.dist-info" / "RECORD").write_text("fake/__init__.py,sha256=one,10\n")
    return site


def test_a_project_is_what_git_does_not_ignore(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    for name in ("scripts/train.py", "helper.py", "secret.env", "big.bin"):
        (project / name).write_text("1")
    (project / ".gitignore").write_text("*.env\n*.bin\n")
    without = project_source(project / "scripts" / "train.py")
    assert without.path == project / "scripts"  # nothing marks a project
    subprocess.run(["git", "init", "-q", str(project)], check=True, timeout=30)
    source = project_source(project / "scripts" / "train.py")
    assert source.path == project and source.override == {"script.path": "scripts/train.py"}
    assert {name for name, _ in source.files} == {".gitignore", "helper.py", "scripts/train.py"}
    with pytest.raises(SpecError, match="no such file"):
        project_source(project / "nothing.py")


@pytest.fixture
def hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hf"


def test_what_the_spec_names_must_be_there(tmp_path: Path, hf_home: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        bundles.build(spec_of(tmp_path, data={"source": str(tmp_path / "gone.jsonl")}), packages=False)
    with pytest.raises(SpecError, match="no such folder"):
        bundles.build(spec_of(tmp_path, model={"name": "./gone"}), packages=False)
    with pytest.raises(EnvironmentNotAble, match=r"not in the cache.*hf download org/m --revision v1"):
        bundles.build(spec_of(tmp_path, model={"name": "org/m", "revision": "v1"}), packages=False)
    with pytest.raises(EnvironmentNotAble, match="is not in the cache"):
        bundles.build(spec_of(tmp_path, data={"source": "org/d"}), packages=False)


def test_models_and_data_of_the_hub_come_from_the_cache_at_their_revision(tmp_path: Path, hf_home: Path) -> None:
    repo = hf_home / "hub" / "models--org--m"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs" / "w").write_bytes(b"weights")
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/w")
    data = hf_home / "datasets" / "org___d" / "default" / "0.0.0"
    for version in (COMMIT, "f" * 40):
        (data / version).mkdir(parents=True)
        (data / version / "dataset_info.json").write_text("{}")
    with pytest.raises(EnvironmentNotAble, match=r"several versions .* pin data.revision"):
        bundles.build(spec_of(tmp_path, data={"source": "org/d"}), packages=False)
    spec = spec_of(tmp_path, model={"name": "org/m"}, data={"source": "org/d", "revision": COMMIT})
    made = bundles.build(spec, packages=False)
    model = made.part("model")
    assert model is not None and model.revision == COMMIT and names_in(model) == ["config.json", "model.safetensors"]
    told = node_stage(made, "n1", ["model", "data"], "/t/j")
    assert told.overrides == {"model.name": "/t/j/model", "model.revision": None}
    assert told.environment()["HF_DATASETS_CACHE"] == "/t/j/data"
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(EnvironmentNotAble, match=r"is incomplete: part-2.safetensors"):
        bundles.build(spec, packages=False)


def manifest_of(nodes: list[NodeStage]) -> StageManifest:
    return StageManifest(job="c.1.0", bundle="", interpreter="/py", method="", bytes_sent=0, seconds=0, nodes=nodes)


def with_environment(tmp_path: Path) -> bundles.Bundle:
    sources = [package_source(), environment_source(fake_site(tmp_path / "site"))]
    return bundles.assemble(sources, tmp_path / "store", {})


def test_what_a_node_is_told_to_use(tmp_path: Path) -> None:
    made = with_environment(tmp_path)
    plain = node_stage(made, "n1", [], "/t/j")
    assert (plain.folder, plain.python, plain.python_path, plain.environment()) == (None, sys.executable, [], {})
    staged = node_stage(made, "n2", ["allranks", "env"], "/t/j")
    assert staged.python == "/t/j/env/bin/python" and staged.environment("x")["PYTHONPATH"] == "/t/j/allranks:x"
    manifest = manifest_of([plain, staged])
    manifest.save(tmp_path / "stage.json")
    assert load_manifest(tmp_path / "stage.json") == manifest and manifest.of("n2") is staged


def test_one_command_gives_each_node_its_own_python(tmp_path: Path) -> None:
    made = with_environment(tmp_path)
    nodes = [node_stage(made, "n1", [], "/t/j"), node_stage(made, "n2", ["allranks"], str(tmp_path / "it's"))]
    command = manifest_of(nodes).python(["env", "X=1", sys.executable])
    code = "import os; print(os.environ['X'], os.environ.get('PYTHONPATH'), os.environ.get('HF_HUB_OFFLINE'))"
    told = {}
    for name in ("n1", "n2"):
        env = {"SLURMD_NODENAME": name, "PYTHONPATH": "before", "PATH": "/usr/bin:/bin"}
        done = subprocess.run([*command, "-c", code], env=env, capture_output=True, text=True, timeout=30)
        told[name] = done.stdout.strip()
    assert told == {"n1": "1 before None", "n2": f"1 {tmp_path}/it's/allranks:before 1"}
    nothing = manifest_of(nodes[:1])
    assert nothing.python(["py"]) == ["py"] and nothing.python() == ["/py"]


def test_ranks_read_the_spec_as_their_node_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(tmp_path / "rows.jsonl")
    spec = spec_of(tmp_path, data={"source": str(data)})
    made = bundles.build(spec, packages=False)
    nodes = [node_stage(made, "n1", [], "/t"), node_stage(made, "n2", ["data"], "/t")]
    assert nodes[1].overrides == {"data.source": "/t/data/rows.jsonl"} and for_node(spec, nodes[0]) == spec
    file = tmp_path / "stage.json"
    assert spec_here(spec, file) is spec
    manifest_of(nodes).save(file)
    for name, source in (("n1", str(data)), ("n2", "/t/data/rows.jsonl"), ("elsewhere", str(data))):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        seen = spec_here(spec, file)
        assert seen.data is not None and seen.data.source == source


def test_clashes_of_versions_are_named_with_their_cure() -> None:
    old = {"datasets": "2.19.0", "numpy": "2.1.0", "pandas": "2.2.2", "torch": "2.3.1+cpu"}
    (clash,) = package_conflicts(old)
    assert "datasets 2.19.0 with numpy 2.1.0" in str(clash) and "numpy<2" in str(clash)
    assert package_conflicts({**old, "numpy": "1.26.4"}) == [] == package_conflicts({**old, "datasets": "3.2.0"})
    assert package_conflicts({"datasets": "2.19.0"}) == []
    assert parse_release("2.3.1+cpu") == (2, 3, 1) and parse_release("?") == ()


def test_clashing_packages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "package_versions", lambda: {"datasets": "2.19.0", "numpy": "2.0.0"})
    with pytest.raises(EnvironmentNotAble, match=r"datasets 2.19.0 with numpy 2.0.0.*pip install"):
        bundles.build(spec_of(tmp_path))


def test_the_verb_prints_one_document(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("model: {name: tiny:mistral}\ndata: {source: builtin:instructions}\n")
    done = allranks("stage", tmp_path / "s.yaml", "--no-packages", "--json", "--to", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [part["name"] for part in shown["parts"]] == ["allranks"] and shown["bytes"] > 100_000


def tree(folder: Path) -> list[tuple[str, Path]]:
    (folder / "pkg").mkdir(parents=True)
    for name, text in (("pkg/a.py", "A = 1\n"), ("run.sh", "#!/bin/sh\n"), ("ünï", "x" * 5000), ("long-" * 30, "y")):
        (folder / name).write_text(text)
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("run.sh")
    return files_of(folder)


def files_of(folder: Path) -> list[tuple[str, Path]]:
    return [(str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.is_file()]


def packed(target: Path, files: list[tuple[str, Path]]) -> str:
    pack(target, files)
    return file_hash(target)


def test_unpacking_gives_the_files_back(tmp_path: Path) -> None:
    files, out = tree(tmp_path / "one"), tmp_path / "out"
    sha256 = packed(tmp_path / "p.tar", files)
    assert packed(tmp_path / "again.tar", list(reversed(files))) == sha256, "in any order"
    unpack(str(tmp_path / "p.tar"), str(out), sha256)
    assert len(files_of(out)) == 5 and out.stat().st_mode & 0o777 == 0o700
    assert (out / "pkg" / "a.py").read_text() == "A = 1\n"
    assert os.access(out / "run.sh", os.X_OK) and not os.access(out / "ünï", os.X_OK)
    assert not (out / "link").is_symlink() and (out / "link").read_text() == "#!/bin/sh\n"


def test_compiled_files_stay_valid_and_stale_ones_stale(tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    for name in ("good", "stale"):
        (site / f"{name}.py").write_text(f"NAME = {name!r}\n")
        os.utime(site / f"{name}.py", (10**9, 10**9))
        py_compile.compile(str(site / f"{name}.py"))
    (site / "stale.py").write_text("NAME = 'other'\n")  # of the same size
    os.utime(site / "stale.py", (9, 9))
    sha256 = packed(tmp_path / "p.tar", files_of(site))
    unpack(str(tmp_path / "p.tar"), str(out), sha256)
    start = [sys.executable, "-v", "-B", "-c", "import good, stale; print(good.NAME, stale.NAME)"]
    done = subprocess.run(start, cwd=out, capture_output=True, text=True, timeout=30)
    assert done.stdout == "good other\n" and "bytecode is stale for 'stale'" in done.stderr
    assert any("matches" in line and "good" in line for line in done.stderr.splitlines())


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, int(kind == tarfile.REGTYPE)
    return made


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no filter of archives")
@pytest.mark.parametrize(
    "entries",
    [
        [entry("../evil")], [entry("a/../../evil")],
        [entry("out", tarfile.SYMTYPE, "../.."), entry("out/evil")],
        [entry("hard", tarfile.LNKTYPE, "/etc/passwd")], [entry("null", tarfile.CHRTYPE)],
        [entry("pipe", tarfile.FIFOTYPE)],
    ],
)  # fmt: skip
def test_hostile_archives_are_refused_and_leave_nothing(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    """Even with the hash that was announced, which only the user's own bundles have."""
    archive, place = tmp_path / "evil.tar", tmp_path / "place"
    with tarfile.open(archive, mode="w") as tar:
        for item in entries:
            tar.addfile(item, io.BytesIO(b"x") if item.isreg() else None)
    place.mkdir()
    with pytest.raises(Refused, match="cannot be unpacked"):
        unpack(str(archive), str(place / "out"), file_hash(archive))
    assert list(place.iterdir()) == [] and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("damage", [0.02, 0.5, 0.999, 0, 700, -512])
def test_a_changed_byte_and_a_cut_archive_are_found(tmp_path: Path, damage: float) -> None:
    """A share: the place of the byte; a whole number: where it is cut."""
    sha256 = packed(tmp_path / "p.tar", tree(tmp_path / "one"))
    content = bytearray((tmp_path / "p.tar").read_bytes())
    if isinstance(damage, float):
        content[int(len(content) * damage)] ^= 1
    else:
        del content[damage:]
    (tmp_path / "p.tar").write_bytes(content)
    with pytest.raises(Refused, match="is damaged"):
        unpack(str(tmp_path / "p.tar"), str(tmp_path / "out"), sha256)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_identity_sees_content_names_and_what_is_missing(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        tree(tmp_path / folder)
        (tmp_path / folder / "large").write_bytes(bytes(3 << 20))
    a, b, names = str(tmp_path / "a"), str(tmp_path / "b"), ["pkg/a.py", "large"]
    assert identity(a, names) == identity(b, names) is not None
    (tmp_path / "b" / "large").write_bytes(bytes((3 << 20) - 1) + b"x")
    assert identity(a, names) != identity(b, names) is not None and identity(a, ["no-such"]) is None
    assert identity(str(tmp_path / "a" / "run.sh"), [""]) == identity(str(tmp_path / "b" / "run.sh"), [""])


def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    node.own_folder(str(tmp_path / "mine"))
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "other").mkdir(mode=0o700)
    names = ["open", "link"]
    if os.getuid() == 0:
        os.chown(tmp_path / "other", 65534, 65534)
        names.append("other")
    for name in names:
        with pytest.raises(Refused, match="this user alone"):
            node.own_folder(str(tmp_path / name))


def test_only_folders_of_ended_jobs_are_swept(tmp_path: Path) -> None:
    for name in ["box.7.0", "box.8.0", "box.9.0", "box.9.1", "box.12.0", "other.7.0", "x"]:
        (tmp_path / name).mkdir()
    node.sweep(str(tmp_path), {"job": "box.9.1", "live": ["8", "9"]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["box.12.0", "box.8.0", "box.9.1", "other.7.0", "x"]
    shutil.rmtree(tmp_path / "box.8.0")
    (tmp_path / "box.7.0").mkdir()
    node.sweep(str(tmp_path), {"job": "box.9.1", "live": None})
    assert (tmp_path / "box.7.0").exists()


@pytest.fixture
def tmpdir_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.usefixtures("tmpdir_variable")
def test_nothing_is_removed_behind_a_link_that_somebody_else_made(tmp_path: Path) -> None:
    behind = tmp_path / "elsewhere" / "c.5.0"
    behind.mkdir(parents=True)
    root = Path(node.job_root())
    root.symlink_to(behind.parent)
    node.sweep(str(root), {"job": "c.9.0", "live": []})
    assert node.remove({"job": "c.5.0"}) == {"gone": True} and behind.is_dir()
    root.unlink()
    behind.parent.rename(root)
    root.chmod(0o700)
    assert node.remove({"job": "c.5.0"}) == {"gone": True} and not root.exists()


@pytest.mark.usefixtures("tmpdir_variable")
def test_where_a_node_takes_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.job_root() == f"{tmp_path}/allranks-{os.getuid()}"
    for useless in (str(tmp_path / "gone"), "relative", ""):
        monkeypatch.setenv("TMPDIR", useless)
        assert node.job_root() == f"/tmp/allranks-{os.getuid()}"  # noqa: S108
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    assert node.job_root() == f"{tmp_path}/allranks-{os.getuid()}" and node.will_do(str(tmp_path))
    monkeypatch.setattr(node.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert not node.will_do(str(tmp_path))
