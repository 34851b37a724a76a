# Making the private Python environment: found, checked, filled. Sourced by scripts/llmd,
# scripts/check and installers/install.sh, which set `root` (the checkout) first. POSIX sh.
#
# All words go to stderr, a few plain lines; what pip says goes to a log that errors name.
# Whoever pipes something into llmd keeps it: nothing here reads stdin.

# shellcheck source=installers/torch.sh
. "${root:?}/installers/torch.sh"

needed_mb=3000 # torch unpacked, its wheel, and a small model
needed_mb_cuda=9000

say() { printf 'llmd: %s\n' "$*" >&2; }

die() {
    printf 'Error: %s\n' "$*" >&2
    exit 1
}

# Sets `python`: LLMD_PYTHON, else the first Python that is new enough.
find_python() {
    for candidate in ${LLMD_PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            return 0
        fi
    done
    found=$("${LLMD_PYTHON:-python3}" --version 2>/dev/null) || found="no python3"
    die "llmd needs Python 3.11 or newer and found $found; install one (for example 'apt install python3.11 python3.11-venv') or name it in LLMD_PYTHON."
}

check_venv_module() {
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "this Python has no venv module; install it (on Debian or Ubuntu: 'sudo apt install python3-venv') and try again."
}

# check_space FOLDER: the nearest folder above it that exists decides.
check_space() {
    folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    wanted_mb=$needed_mb
    [ "$(torch_build)" != cuda ] || wanted_mb=$needed_mb_cuda
    free_mb=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free_mb" -ge "$wanted_mb" ] ||
        die "llmd needs about $wanted_mb MB of disk and $folder has $free_mb MB free; make room and try again."
}

# What an environment was made from; it is made anew when this changes.
environment_stamp() {
    printf '%s %s\n' "$1" "$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
}

# is_ready ENVIRONMENT KIND: an environment with the dev extras serves for all.
is_ready() {
    [ -x "$1/bin/python" ] && [ -f "$1/llmd-ready" ] || return 1
    stamp=$(cat "$1/llmd-ready")
    [ "$stamp" = "$(environment_stamp "$2")" ] || [ "$stamp" = "$(environment_stamp dev)" ]
}

# make_environment ENVIRONMENT KIND LOG PIP-ARGUMENTS...: KIND is user or dev.
make_environment() {
    environment=$1 kind=$2 log=$3
    shift 3
    began=$(date +%s)
    find_python
    check_venv_module
    if ! has_torch "$environment/bin/python"; then check_space "$environment"; fi
    mkdir -p "$(dirname "$log")"
    : >"$log"
    rm -f "$environment/llmd-ready"
    say "making a private Python environment in $environment; this is done once"
    "$python" -m venv "$environment" </dev/null >>"$log" 2>&1 ||
        die "no environment could be made in $environment; see $log."
    torch_version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
    install_torch "$environment/bin/python" "$torch_version" "$log" || die_of_pip "$log"
    say "installing the other packages"
    "$environment/bin/python" -m pip install --no-compile -c "$root/constraints.txt" "$@" \
        </dev/null >>"$log" 2>&1 || die_of_pip "$log"
    say "compiling"
    compile_ahead "$environment/bin/python" >>"$log" 2>&1 || say "not all was compiled; see $log"
    environment_stamp "$kind" >"$environment/llmd-ready"
    say "ready after $(($(date +%s) - began)) s"
}

# compile_ahead PYTHON: byte code of what llmd imports, and the CPU kernels; else the first start
# makes them. pip would compile all there is, on one core: a minute for what nobody imports.
compile_ahead() {
    PYTHONDONTWRITEBYTECODE='' "$1" -P - <<'PYTHON'
import contextlib, importlib, pkgutil
import llmd
from llmd.backend.kernels.cpu_launch import prepare

prepare()
for module in pkgutil.walk_packages(llmd.__path__, "llmd."):
    if not module.name.startswith("llmd.tests") and not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of what only a GPU needs, or another system
            importlib.import_module(module.name)
PYTHON
}

die_of_pip() {
    if grep -qi 'no space left' "$1"; then
        die "the disk is full; make room (about $needed_mb MB) and try again."
    elif grep -qiE 'connection|name resolution|timed out|unreachable|no matching distribution' "$1"; then
        die "the package index can't be reached; check the network or the proxy (HTTPS_PROXY) and try again. Details: $1"
    fi
    die "a package could not be installed; the end of $1 says why."
}
