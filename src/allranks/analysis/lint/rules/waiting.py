"""Rules for what a script waits for: programs that do not end, and background programs that it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import PYTHON, SHELLS, WRAPPERS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.subshells import runs_once
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------- programs that do not end

BLOCKS_WHY = "The command does not end by itself: what stands below it never runs, and the job holds its GPUs until its time limit."
BLOCKS_CURE = "start it in the background (&), and end it after the training; or remove it"


def blocks(job: JobDescription) -> Iterator[Violation]:
    """Report a command in the foreground that never ends, above the job's work or above another server."""
    servers = {c.starter.offset for c in job.calls if not (c.in_substitution or c.in_function) and _is_server(c)}
    foreground = [w for w in job.work if w.after != "&"]
    for call in job.calls:
        outer = call.starter
        served = outer.offset in servers and _is_server(call) and all(c.program in STAYS for c in call.under)
        if not (job.runs_unattended or served) or call.in_substitution or call.in_function or outer.tested:
            continue
        if (call.under and not served) or any(r.operator.startswith("<") for r in call.redirects):
            continue
        piped = outer.is_piped and not (served and _ends_in_tee(job, outer))
        if outer.before in ("&&", "||", "|") or outer.after in ("&", "||") or piped or not _never_ends(call):
            continue
        below = [*job.work, *(c for c in job.calls if c.offset in servers and not c.under)] if served else foreground
        later = [w for w in below if w.offset > outer.offset and w.branch[: len(outer.branch)] == outer.branch]
        again = served and outer.in_loop and not runs_once(job, outer)
        if again or any(not w.in_function for w in later):
            words = " ".join([call.written, *(a.text for a in call.args)])[:50]
            below_it = "the next run of the loop never starts" if again else "the programs below it never start"
            yield Violation(outer.offset, f"'{words}' does not end: {below_it}")
            return


STAYS = {"srun", "nohup", "env", "numactl", "taskset", "time", "apptainer", "singularity", "mpirun", "bash", "sh", "conda",
         "mamba", "micromamba", "uv", "poetry", "pixi", "pipenv", "stdbuf", "nice", "unbuffer"}  # fmt: skip
DAEMON = lazy_regex(r"--?(?:daemon\w*|fork|detach\w*|background)\b|(?<!\S)-D(?!\S)")


def _is_server(call: ProgramCall) -> bool:
    """Return whether the command serves requests until something ends it."""
    words = " ".join(a.text for a in call.args)
    if DAEMON.search(words):
        return False
    if call.program in RUNNERS:
        return bool(WRAPPED_SERVER.match(f" {words}")) and not ENDS_BY_ITSELF.search(words)
    server = PYTHON_SERVER.match(words) if PYTHON.match(call.program) else OUTER_SERVER.match(f"{call.program} {words}")
    return bool(server) and _never_ends(call) and (call.program in SERVERS or PYTHON.match(call.program) is not None)


def _ends_in_tee(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the pipe that begins with the command gives its output to tee, in the foreground."""
    following = next((c for c in job.calls if c.offset > call.offset and not (c.under or c.in_substitution)), None)
    return following is not None and following.program == "tee" and following.after in ("\n", ";", "")


SCREENS = {"watch", "htop", "nvtop", "vim", "vi", "nano", "emacs", "less", "more", "nvitop", "gpustat"}
LOOPS_IN = {
    "nvidia-smi": lazy_regex(r"-l\d*|--loop(?:-ms)?(?:=.*)?|dmon|pmon"),
    "tail": lazy_regex(r"-\w*[fF]|--follow.*"),
    "jupyter": lazy_regex(r"notebook|lab|server"),
    "jupyter-lab": lazy_regex(r".*"),
    "jupyter-notebook": lazy_regex(r".*"),
    "tensorboard": lazy_regex(r".*"),
    "mlflow": lazy_regex(r"ui|server"),
    "gpustat": lazy_regex(r"-\w*i\w*|--interval.*"),
    "sleep": lazy_regex(r"inf|infinity"),
    "top": lazy_regex(r".*"),
}


RUNNERS = {"apptainer", "conda", "mamba", "micromamba", "pixi", "poetry", "singularity", "uv"}
"""Programs that run another one in a container or an environment."""


def _never_ends(call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    if call.program in RUNNERS:
        return _is_server(call)
    if call.program == "top":
        return not any(re.match(r"-\w*[bn]", w) for w in words)
    if call.program in SCREENS - {"gpustat"}:
        return not {"--version", "--help", "-V", "-v"} & set(words)
    if "--help" not in words and not ENDS_BY_ITSELF.search(f"{call.program} {' '.join(words)}"):
        if PYTHON.match(call.program):
            return bool(PYTHON_SERVER.match(" ".join(words)))
        if call.program in SERVERS and OUTER_SERVER.match(f"{call.program} {' '.join(words)}"):
            return True
    pattern = LOOPS_IN.get(call.program)
    if pattern is None or {"--version", "--help"} & set(words):
        return False
    words = words[:1] if call.program == "jupyter" else words
    return call.program == "tensorboard" or any(pattern.fullmatch(w) for w in words)


SERVERS = {
    "vllm",
    "uvicorn",
    "gunicorn",
    "ollama",
    "tritonserver",
    "text-generation-launcher",
    "streamlit",
    "litellm",
    "llama-server",
    "lmdeploy",
    "redis-server",
    "mongod",
    "Xvfb",
    "trtllm-serve",
    "trl",
    "CarlaUE4.sh",
}
ENDLESS_WHY = "wait without arguments waits for all background processes: the job runs until its time limit."
ENDLESS_CURE = 'keep the process id of the training: train & pid=$!; wait "$pid"; rc=$?; kill %1; exit $rc'
SERVER = (
    r"(?:uvicorn|gunicorn|hypercorn|waitress-serve|redis-server|mongod|tritonserver|text-generation-launcher|ollama\s+serve|(?:vllm|ray|lmdeploy)\s+serve|trl\s+vllm[-_]serve|swift\s+(?:rollout|deploy)|"
    r"vllm\.entrypoints\.\S+|(?:fastchat|llava)\.serve\.(?:controller|model_worker|vllm_worker|sglang_worker|multi_model_worker|openai_api_server|gradio_web_server)|"
    r"sglang\.launch_server|http\.server|SimpleHTTPServer|ray\s+start\s.*--block|tensorboard(?:\.main)?|jupyter(?:-|\s+)(?:notebook|lab|server)|"
    r"mlflow\s+(?:server|ui)|streamlit\s+run|flask\s+run|aim\s+(?:up|server)|visdom(?:\.server)?|nvidia-smi\s(?:.*\s)?(?:-l|-lms|--loop|--loop-ms)(?:[=\s]\S+)?|"
    r"nvidia-smi\s+(?:dmon|pmon)|nvtop|dcgmi\s+dmon|gpustat\s.*-i|dcgm-exporter|watch\s.*|tail\s+(?:-\w*[fF]|--follow)|sleep\s+inf(?:inity)?|"
    r"code-server|llama-server|litellm|dask-(?:scheduler|worker|cuda-worker)|dask\s+(?:scheduler|worker|cuda\s+worker)|etcd|minio\s+server|celery|ngrok|mosquitto|rabbitmq-server|prometheus|node_exporter|"
    r"Xvfb\s+:\d+|trtllm-serve|CarlaUE4\.sh|ssh\s(?:.*\s)?-[fCqTgnv]*N\w*|vmstat\s+(?:-\S+\s+)?\d+|top\s+-\w*b(?!.*-\w*n))(?=\s|&|\Z)"
)
OUTER_SERVER = lazy_regex(SERVER)
WRAPPED_SERVER = lazy_regex(r"(?:.*\s(?:run|exec|shell|--|-n\s+\S+|\S+\.(?:sif|simg|sqsh)))?\s+" + SERVER)
PYTHON_SERVER = lazy_regex(r"(?:-\w\s+)*-m\s+" + SERVER)
ENDS_BY_ITSELF = lazy_regex(
    r"\b(?:timeout\s+\S*\d|nvidia-smi\s.*-c\s|dmon\s.*-c\s|--help|--version|tensorboard\s+dev|--pid=)"
)
STOPS = {"kill", "pkill", "killall", "trap", "scancel"}


def server_awaited(job: JobDescription) -> Iterator[Violation]:
    """Report a plain ``wait`` behind a server, a monitor or an endless loop in the background that nothing ends."""
    if any(c.program in STOPS for c in job.calls) or re.search(r"\bkill\b", job.code):
        return
    found: list[tuple[int, str]] = []
    for call in job.calls:
        outer = call.under[0] if call.under else call
        words = " ".join(a.text for a in call.args)
        behind = outer.after == "&" and not call.in_function and not outer.in_substitution
        if (
            not behind
            or ENDS_BY_ITSELF.search(f"{call.program} {words}")
            or any(c.program == "timeout" for c in call.under)
        ):
            continue
        if PYTHON.match(call.program):
            server = PYTHON_SERVER.match(words) or re.match(
                r"(?:\S*/)?(?:api_server|serve|server|launch_server)\.py\b", words
            )
        elif call.program in WRAPPERS:
            server = OUTER_SERVER.match(f"{call.program} {words}") or WRAPPED_SERVER.match(" " + words)
        else:
            server = OUTER_SERVER.match(f"{call.program} {words}")
        if server:
            found.append((outer.offset, " ".join(f"{call.program} {words}".split()[:4])[:40]))
    found += _endless_loops(job)
    if not found:
        return
    place, what = min(found)
    if _only_servers(job, {offset for offset, _ in found}):
        return
    for call in job.calls:
        if call.program == "wait" and not call.args and call.offset > place and not call.under and not call.in_function:
            text = f"wait also waits for '{what}' in line {job.lines.place(place)[0]}, which does not end by itself"
            yield Violation(call.offset, text)
            return


def _only_servers(job: JobDescription, places: set[int]) -> bool:
    """Return whether the job consists of several servers, or of loops without an end: its time limit ends it."""
    behind = [c for c in job.calls if not c.under and not c.in_substitution and c.offset > min(places)]
    scripts = [c for c in behind if c.program in SHELLS and c.args and not c.args[0].text.startswith("-")]
    works = {c.offset for c in (*(c for c in behind if c.after == "&"), *scripts, *job.work)}
    return not works - places and (len(places) > 1 or bool(_endless_loops(job)))


ENDLESS_LOOP = lazy_regex(
    r"(?m)^([ \t]*)while[ \t]+(?:true|:|\[[ \t]1[ \t]\])[ \t]*(?:;|\n)(?:(?!\n\1done\b)[^\0]){0,1500}?(?:\n\1|;[ \t]*)done[^\n&]*&[ \t]*(?:#.*)?$"
)
FUNCTION = lazy_regex(
    r"(?m)^[ \t]*(?:function[ \t]+)?([\w-]+)[ \t]*(?:\([ \t]*\))?[ \t]*\{((?:(?!\n\}|\}[ \t]*$)[^\0]){0,2000})(?:\n\}|\}[ \t]*$)"
)
FOR_EVER = lazy_regex(r"\bwhile[ \t]+(?:true|:|\[[ \t]1[ \t]\])[ \t]*(?:;|\n)")
ENDS_LOOP = lazy_regex(r"\b(?:break|exit|return)\b")


def _endless_loops(job: JobDescription) -> list[tuple[int, str]]:
    """Return the endless loops in the background: written there, or in a function that is started there."""
    loops = [loop for loop in ENDLESS_LOOP.finditer(job.text) if not ENDS_LOOP.search(loop[0])]
    loops = [
        loop for loop in loops if "nvidia-smi" in loop[0] or not re.search(r"\bsrun\s", loop[0])
    ]  # it starts the work again and again
    starts = (loop.start() + len(loop[1]) for loop in loops)
    found = [(start, "the endless loop") for start in starts if not job.in_comment(start)]
    bodies = {m[1]: m[2] for m in FUNCTION.finditer(job.text)}
    endless = {name for name, body in bodies.items() if FOR_EVER.search(body) and not ENDS_LOOP.search(body)}
    own = (c for c in job.calls if c.written in endless and c.after == "&" and not c.under and not c.in_function)
    return found + [(c.offset, c.written) for c in own]


FOLLOWS_WHY = "tail -f does not end when the program has ended: the job holds its GPUs until its time limit, and is reported as TIMEOUT."
FOLLOWS_CURE = 'tail -f --pid="$pid" log, or wait instead of tail'
STARTS_SERVER = lazy_regex(
    r"(?i)\b(?:serve|server|controller|worker|daemon|gradio|api|ollama|jupyter|ray|dask|mysqld)\b|_server|server_"
)


def follows_log(job: JobDescription) -> Iterator[Violation]:
    """Report ``tail -f log`` as the last command of a job whose program is no server."""
    if not job.is_job or any(c.program in STOPS for c in job.calls) or STARTS_SERVER.search(job.code):
        return
    own = [c for c in job.calls if not (c.under or c.in_substitution or c.in_function)]
    last = own[-1] if own else None
    if last is None or last.program != "tail" or last.branch or last.after not in ("\n", ";", "") or len(own) < 2:
        return
    words = [a.text for a in last.args]
    follows = any(re.fullmatch(r"-\w*[fF]\w*|--follow(?:=\w+)?", w) for w in words)
    if follows and not any(w.startswith("--pid") for w in words):
        yield Violation(
            last.offset, "tail -f never ends, and so neither does the job", why=FOLLOWS_WHY, cure=FOLLOWS_CURE
        )


EXIT_WHY = "The shell ends here, whatever stands below."


RUNS_WORK = lazy_regex(r"\b(?:python[\d.]*|mpirun|mpiexec|srun|torchrun|accelerate|deepspeed)\b[ \t]+\S")


def _told_to_run(job: JobDescription, end: ProgramCall) -> bool:
    """Return whether an unknown command above gets the work as a text: ``run_or_die "python x.py"``."""
    above = (c for c in job.calls if c.offset < end.offset and c.program not in ("echo", "printf", "which", "module"))
    return any(RUNS_WORK.search(a.text) for c in above for a in c.args)


def exits_early(job: JobDescription) -> Iterator[Violation]:
    """Report an unconditional exit, or an exec of a shell, above all work of the job."""
    if not job.is_job or not job.work:
        return
    for call in job.calls:
        if call.in_substitution or call.in_function or call.in_loop or call.branch or call.under or call.tested:
            continue
        if call.before in ("&&", "||", "|", "(", "{") or call.after in ("|", "&", "&&", "||"):
            continue
        shell = (
            call.program in ("bash", "sh", "zsh") and not call.args and re.match(r"\s*exec\s", job.line_of(call.offset))
        )
        plain = call.program == "exit" and re.match(r"\s*exit\b", job.line_of(call.offset))
        if (plain or shell) and all(w.offset > call.offset for w in job.work) and not _told_to_run(job, call):
            text = f"{'exec ' if shell else ''}{call.written} ends the script above its work: nothing below it runs"
            yield Violation(call.offset, text, why=EXIT_WHY, cure="remove it")
            return


# ------------------------------------------------------------------------------ background programs

WAIT_WHY = "The job ends when the batch script ends, and Slurm then kills all its processes."
WAIT_CURE = "wait, as the last line"


def background(job: JobDescription) -> Iterator[Violation]:
    work = _background_work(job)
    for outer in reversed(work):
        if not job.runs_unattended and not job.launches:
            continue  # in a terminal they go on when the script has ended
        if not job.is_batch and (not outer.in_loop or re.search(r"\b(?:nohup|setsid|tmux|screen|disown)\b", job.text)):
            continue
        if outer.after == "&" and not outer.in_function and not outer.in_substitution:
            later = [c for c in job.calls if c.offset > outer.offset and not c.under]
            awaited = any(c.program in ("wait", "tail", "exec", "source", ".") for c in later) or _is_watched(
                job, outer
            )
            last = [w for w in work if w.offset > outer.offset and w.after != "&"]
            if not awaited and not last:
                yield Violation(
                    outer.offset, f"{outer.program} runs in the background, and the script ends without wait"
                )
                return
            if (
                not awaited
                and _script_of(outer)
                and all(_script_of(w) == _script_of(outer) for w in last)
                and job.is_job
            ):
                text = f"{_script_of(outer)} runs in the background, and the script ends when the last one in the foreground has ended"
                yield Violation(outer.offset, text)
                return
            if not awaited and job.is_batch and len(last) == 1 and _same_line(job, outer, last[0]):
                text = f"{outer.program} runs in the background beside {last[0].program}, and the script ends with that one"
                yield Violation(outer.offset, text, cure="&& starts one after the other; or end the script with wait")
                return


def _same_line(job: JobDescription, first: ProgramCall, second: ProgramCall) -> bool:
    """Return whether one line has both commands, with ``&`` between them."""
    return job.lines.place(first.offset)[0] == job.lines.place(second.offset)[0] and not second.in_loop


VARYING = lazy_regex(r"\$\([^)]*\)|\$\{?[\w@#*]+(?:\[[^\]]*\])?\}?|\d+")


def beside_last(job: JobDescription) -> Iterator[Violation]:
    """Report the same command several times, all in the background but the last, with which the job ends."""
    if (
        not job.runs_unattended
        or CHECKS_RESULTS.search(job.code)
        or re.search(r"\bwait\b|(?m:^[ \t]*exec\b)", job.code)
    ):
        return
    own = [c for c in job.calls if not (c.under or c.in_substitution or c.in_function)]
    loud = [c for c in own if c.program not in QUIET]
    last = loud[-1] if loud else None
    if last is None or last.after in ("&", "|", "|&", "&&", "||") or last.in_loop or last.branch or last.tested:
        return
    script = last.program in SHELLS or last.written.endswith((".sh", ".bash"))
    if last.program not in RANK_STARTERS and not script and last.offset not in {w.offset for w in job.work}:
        return
    beside = [c for c in loud if c.after == "&" and c.program == last.program and _shape(c) == _shape(last)]
    if beside and not beside[-1].branch and last.args:
        text = f"{last.program} runs in the background, and the job ends when the last one, in line {job.lines.place(last.offset)[0]}, has ended"
        yield Violation(beside[-1].offset, text, cure="start the last one with & too, and wait for each process id")


def _shape(call: ProgramCall) -> list[str]:
    """Return the words of a command without what differs between its repetitions: numbers and variables."""
    return [VARYING.sub("N", a.text) for a in call.args]


LAST_ONLY = lazy_regex(r"\$!|\$\{!\}")
LAST_WHY = "$! is the last one: when it has ended, the script ends, and with it the others."


def waits_for_last(job: JobDescription) -> Iterator[Violation]:
    """Report ``wait $!`` behind several programs in the background, as the only wait."""
    if not job.is_job:
        return
    waits = [c for c in job.calls if c.program == "wait" and not c.under]
    behind = [w for w in job.work if w.after == "&" and not w.in_function]
    if len(waits) != 1 or [a.text for a in waits[0].args] not in (["$!"], ["${!}"]) or waits[0].in_loop:
        return
    kept = [m for m in LAST_ONLY.finditer(job.text) if not job.in_comment(m.start())]
    several = len([w for w in behind if w.offset < waits[0].offset]) > 1 or any(w.in_loop for w in behind)
    later = any(w.offset > waits[0].offset for w in job.work)
    if len(kept) == 1 and several and not later:
        text = "wait $! waits for the last of the background programs only"
        yield Violation(waits[0].offset, text, why=LAST_WHY, cure="wait, or wait for each process id")


LONG_S = 1800
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _is_long(text: str) -> bool:
    """Return whether ``sleep`` with this argument outlasts a pause; an unknown number may."""
    found = re.fullmatch(r"(\d{1,8})(?:\.\d*)?([smhd]?)", text)
    return int(found[1]) * SECONDS[found[2]] >= LONG_S if found else "$" in text or text.startswith("inf")


def _is_watched(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script keeps the process id, and asks later for the process, or ends it."""
    after = job.text[outer.offset :]
    if any(re.match(LOOP_END, job.code[m.end() :]) for m in FOREVER.finditer(job.code, outer.offset)):
        return True  # the script does not end
    later = [c for c in job.calls if c.offset > outer.offset and c.program == "sleep" and not c.under and not c.branch]
    if any(_is_long(a.text) for c in later for a in c.args):
        return True  # it ends late on purpose
    kept = re.match(r"(?:[^\n\\]|\\.|\\\n)*&[ \t]*[\n;]\s*(\w+)=\$!", after)
    return kept is not None and re.search(rf"\b(?:kill|ps|pgrep|wait)\b[^\n]*\$\{{?{kept[1]}\b", after) is not None


FOREVER = lazy_regex(
    r"(?m)^while[ \t]+(?:true|:|\[\[?[ \t]+(?:1|true)[ \t]+\]\]?|\(\([ \t]*1[ \t]*\)\)|sleep[ \t]+\S+)[ \t]*(?:;[ \t]*do\b|\n[ \t]*do\b)"
)
LOOP_END = r"((?:(?!\ndone\b)[\s\S])*)\ndone\b(?![^\n;]*[&|])"
LEAVES = lazy_regex(r"\b(?:break|exit|return|exec|scancel|qdel|bkill)\b")
FOREVER_WHY = "Nothing ends the loop: when the work has ended, the job holds its nodes until the time limit, and is reported as failed (TIMEOUT)."


def endless_loop(job: JobDescription) -> Iterator[Violation]:
    """Report ``while true`` without an end, behind the work in the background."""
    if not job.is_job or re.search(r"\btrap\b", job.code):
        return
    behind = [w for w in _background_work(job) if w.after == "&" and not w.in_function]
    for found in FOREVER.finditer(job.code, behind[-1].offset) if behind else ():
        body = re.match(LOOP_END, job.code[found.end() :])
        works = body and any(0 < w.offset - found.end() < body.end() for w in job.work)
        if body and not works and not LEAVES.search(body[1]) and re.search(r"\bsleep\b", found[0] + body[1]):
            text = f"this loop never ends, also when {behind[-1].program} has ended"
            cure = 'while kill -0 "$pid" 2>/dev/null; do ...; done; or wait'
            yield Violation(found.start(), text, why=FOREVER_WHY, cure=cure)
            return


def _script_of(call: ProgramCall) -> str:
    """Return the name of the Python program, or of the module in a package; empty if there is none."""
    module = next((n.text for a, n in call.pairs() if a.text == "-m" and n is not None), "")
    return next((a.text for a in call.args if a.text.endswith(".py")), "" if "." not in module else module)


def _background_work(job: JobDescription) -> list[ProgramCall]:
    """Return the commands that do the job's work, with calls of functions that contain it instead of what they contain."""
    inside = [w for w in job.work if w.in_function]
    outside = [w for w in job.work if not w.in_function]
    if not inside or any(c.program == "wait" and c.in_function for c in job.calls):
        return outside
    functions = set(re.findall(r"(?m)^\s*(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\)", job.text))
    calls = [
        c
        for c in job.calls
        if not c.in_function
        and not c.in_substitution
        and (c.program in functions or (c.program == "ssh" and c.after == "&"))
    ]
    found = {c.offset: c for c in [*outside, *calls]}
    return [found[offset] for offset in sorted(found)]


QUIET = {"echo", "printf", "date", "true", ":", "unset", "set", "export", "deactivate", "cat", "squeue", "jobs"}
DETACHED = lazy_regex(r"-\w*d\w*")


def scripts_in_background(job: JobDescription) -> Iterator[Violation]:
    """Report scripts, groups and detached sessions in the background, behind which a batch script ends."""
    if not job.is_job or re.search(r"(?m)^[^#\n]*\b(?:wait|tail\s+-f|sleep|fg)\b", job.text):
        return
    own = [c for c in job.calls if not c.under and not c.in_substitution and not c.in_function]
    loud = [c for c in own if c.program not in QUIET]
    if not loud or any(c.program in ("source", ".", "exec", "eval") and c is loud[-1] for c in loud):
        return
    last = loud[-1]
    work = last.offset in {w.offset for w in job.work}
    if work and last.after == "&" and job.is_batch:
        return  # another part of the rule has it
    words = [a.text for a in last.args]
    script = last.program in SHELLS or last.written.endswith((".sh", ".bash")) or last.written.startswith("./")
    launched = work or last.program == "srun" or script or PYTHON.match(last.program) is not None
    if last.after == "&" and launched and not any(c.program == "trap" for c in own):
        yield Violation(last.offset, f"{last.program} runs in the background, and the script ends without wait")
    elif (
        last.program == "tmux" and words[:1] in (["new"], ["new-session"]) and any(DETACHED.fullmatch(w) for w in words)
    ):
        yield Violation(last.offset, "tmux runs in the background, and the script ends")
    elif last.program in ("docker", "podman") and words[:1] == ["run"] and _is_detached(words[1:]):
        why = "The container belongs to docker's own service, not to the job: the job ends, and the program goes on without its GPUs' reservation."
        yield Violation(
            last.offset, f"{last.program} run -d returns at once, and the script ends", why=why, cure="remove -d"
        )
    elif last.program == "screen" and any(re.fullmatch(r"-\w*d\w*m\w*", w) for w in words):
        yield Violation(last.offset, "screen runs in the background, and the script ends")
    else:
        yield from _group_in_background(job, last)


WITHOUT_VALUE = lazy_regex(r"--(?:rm|init|privileged|tty|interactive|read-only|\S+=\S*)|-[itqP]+")


def _is_detached(words: list[str]) -> bool:
    """Return whether ``-d`` stands among the options of ``docker run``, in front of the image."""
    index = 0
    while index < len(words) and words[index].startswith("-"):
        if words[index] in ("--detach", "--detach=true") or re.fullmatch(r"-[itqP]*d[itqP]*", words[index]):
            return True
        index += 1 if WITHOUT_VALUE.fullmatch(words[index]) else 2
    return False


GROUP_END = lazy_regex(
    r"(?m)(?:^[ \t]*\([^()\n]*\)|(?:^|[ \t;])(?:[)}]|done|fi))[ \t]*(?:[12&]?>+[ \t]*\S+[ \t]*(?:2>&1[ \t]*)?)?&[ \t]*(?:#.*)?$"
)


def _group_in_background(job: JobDescription, last: ProgramCall) -> Iterator[Violation]:
    found = next(
        (m for m in GROUP_END.finditer(job.text) if m.end() > last.offset and not job.in_comment(m.start())), None
    )
    works = [w for w in job.work if found and w.offset < found.end() and not w.in_function]
    loop = found is not None and re.match(r"\s*;?\s*done\b", found[0]) is not None
    if found and works and works[-1].offset >= last.offset and works[-1].in_loop == loop:
        yield Violation(
            works[-1].offset, f"{works[-1].program} runs in the background, and the script ends without wait"
        )


# --------------------------------------------------------------------------------------------- wait

RESULT_WHY = "wait without arguments returns 0, whatever the background commands returned: a failed training is reported as COMPLETED."
RESULT_CURE = 'keep the process ids, and wait for each: srun ... & pids+=($!); for pid in "${pids[@]}"; do wait "$pid" || rc=$?; done'


def wait_result(job: JobDescription) -> Iterator[Violation]:
    """Report a plain ``wait`` whose result is used."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    if not any(c.after == "&" or (c.under and c.under[0].after == "&") for c in job.calls):
        return
    for call, following in pairwise([*own, None]):
        if call is None or call.program != "wait" or call.args:
            continue
        end = following.offset if following else len(job.text)
        kept = [a for a in job.assignments if a.value == "$?" and not a.under and call.offset < a.offset < end]
        used = (
            following
            and following.program in ("exit", "return", "[", "[[", "test")
            and any("$?" in a.text for a in following.args)
        )
        if kept or used or call.tested or call.after == "||":
            yield Violation(call.offset, "wait without arguments returns 0, even if a background command failed")
            return


CHECKS_RESULTS = lazy_regex(
    r"\$[!?]|\$\{[!?]\}|PIPESTATUS|\bwait[ \t]+[-$%\"'\d]|\bkill\b|\btrap\b|\bjobs[ \t]+-|\bset[ \t]+-m\b"
)


RANK_STARTERS = {
    "srun",
    "ssh",
    "pdsh",
    "clush",
    "mpirun",
    "mpiexec",
    "orterun",
    "jsrun",
    "aprun",
    "pbsdsh",
    "blaunch",
    "lrun",
}
GROUP = lazy_regex(
    r"(?im)^[^#\n]*(?:\bMASTER_ADDR\b|--?(?:node|machine)[-_]rank|--rdzv|--?nnodes|--num[-_]machines|--?master[-_]addr|--init[-_]method|"
    r"--dist[-_]url|--main[-_]process[-_]ip|--?world[-_]size|\bWORLD_SIZE\b)"
)
"""What ranks of one group are told."""
SCHEDULER = lazy_regex(r"\b(?:SLURM|PBS|LSB|COBALT|PJM|OAR)_[A-Z]+")
MONITORS = lazy_regex(
    r"\b(?:nvidia-smi|rocm-smi|dcgmi|gpustat|top|htop|vmstat|iostat|sar|tail|ping|nvtop|watch|sleep|tensorboard)\b"
)


def results_of_wait(job: JobDescription) -> Iterator[Violation]:
    """Report a plain ``wait`` for the launchers of all nodes, as the end of a job that checks nothing."""
    launched = {la.call.starter.offset for la in job.launches if la.kind != "python" or la.call.under}
    works = {w.offset: w for w in job.work if not w.in_substitution}
    for call in job.calls:
        words = " ".join(a.text for a in call.args)
        if call.program in RANK_STARTERS and not (call.under or call.in_substitution or MONITORS.search(words)):
            works[call.offset] = call
            launched |= {call.offset} if call.after == "&" else set()
    behind = [works[offset] for offset in sorted(works) if works[offset].after == "&"]
    if not behind or any(w.in_function or w.tested for w in behind) or not launched & {w.offset for w in behind}:
        return
    if any(True for _ in server_awaited(job)):
        return  # the job does not even end
    if CHECKS_RESULTS.search(job.code) or any(w.after != "&" and _counts(job, w, behind) for w in works.values()):
        return
    own = [c for c in job.calls if c.offset > behind[-1].offset and not c.under and not c.in_substitution]
    rest = [c for c in own if c.program not in QUIET and not (c.program == "eval" and c.after == "&")]
    behind_wait = [c for c in rest[1:] if c.program != "exit" or [a.text for a in c.args] != ["0"]]
    if rest and rest[0].program == "wait" and not rest[0].args and not behind_wait and not rest[0].in_loop:
        first = next(w for w in behind if w.offset in launched)
        text = f"wait returns 0, even if {first.program} in the background failed: the job ends with success"
        # Where the programs are independent of each other, the results of the others are left.
        certain = GROUP.search(job.text) and (job.is_job or SCHEDULER.search(job.text))
        yield Violation(
            rest[0].offset, text, why=RESULT_WHY, cure=RESULT_CURE, severity="warning" if certain else "note"
        )


def _counts(job: JobDescription, call: ProgramCall, behind: list[ProgramCall]) -> bool:
    """Return whether a command in the foreground is more than a preparation for those in the background."""
    return call in job.work or call.offset > behind[0].offset
