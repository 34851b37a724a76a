# Shared by scripts/llmd, scripts/check and installers/install.sh: how llmd's private environment is
# made. Sourced by POSIX sh. Every function that can fail prints one sentence that says what to do.

NEEDED_KIB=3500000  # torch's CPU build, its dependencies and room to unpack them
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH_CUDA_INDEX=https://download.pytorch.org/whl/cu130

say() { printf '%s\n' "$*" >&2; }
fail() { printf 'Error: %s\n' "$*" >&2; exit 1; }

# The first Python that is new enough; $LLMD_PYTHON comes first.
find_python() {
    for candidate in ${LLMD_PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    fail "llmd needs Python 3.11 or newer and found none; install it (Debian: apt install python3) or name one in LLMD_PYTHON"
}

check_disk() {  # folder
    folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt "$NEEDED_KIB" ]; then
        fail "llmd's environment needs about $((NEEDED_KIB / 1000)) MB in $folder and only $((free / 1000)) MB are free; make room or choose another place"
    fi
}

make_venv() {  # python, folder
    if ! "$1" -c 'import venv, ensurepip' 2>/dev/null; then
        fail "this Python has no venv module; install it (Debian and Ubuntu: apt install python3-venv)"
    fi
    "$1" -m venv "$2" || fail "the environment could not be made in $2"
}

# The pinned version without the local part, as constraints.txt has it.
torch_version() { sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$1"; }

has_nvidia() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# With an NVIDIA GPU the CUDA build of torch, elsewhere the CPU build, which is ten times smaller.
# An index that does not answer within seconds is given up, and the default index is asked.
install_torch() {  # python of the environment, constraints file
    version=$(torch_version "$2")
    if "$1" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
        return 0
    fi
    index=$TORCH_CPU_INDEX
    has_nvidia && index=$TORCH_CUDA_INDEX
    if reaches "$1" "$index"; then
        "$1" -m pip install --quiet --index-url "$index" "torch==$version" 2>/dev/null && return 0
        say "torch's own index has no torch $version for this machine; the default index is asked"
    fi
    "$1" -m pip install --quiet -c "$2" "torch==$version" ||
        fail "torch $version could not be installed; is there a network, or a proxy to set in HTTPS_PROXY?"
}

reaches() {  # python, url
    "$1" - "$2" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=4).close()
PY
}

install_llmd() {  # python of the environment, constraints file, what to install, extra pip flags
    python=$1 constraints=$2 what=$3
    shift 3
    "$python" -m pip install --quiet -c "$constraints" "$@" "$what" ||
        fail "llmd's packages could not be installed; is there a network, or a proxy to set in HTTPS_PROXY?"
}
