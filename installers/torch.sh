# Which build of torch this machine gets. Sourced by installers/environment.sh; POSIX sh.
#
#   torch >= 2.11 is there already ──▶ left alone
#   an NVIDIA GPU answers          ──▶ the default index: on Linux that is the CUDA build, 3 GB
#   macOS, other systems           ──▶ the default index: there is only one build
#   Linux without such a GPU       ──▶ torch's own CPU index, 0.2 GB; if it can't be reached, the default
#
# LLMD_TORCH=cpu or LLMD_TORCH=cuda decides instead; LLMD_TORCH_INDEX replaces the CPU index.

torch_cpu_index="${LLMD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

# cuda, cpu or default
torch_build() {
    if [ -n "${LLMD_TORCH:-}" ]; then
        printf '%s\n' "$LLMD_TORCH"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo cuda
    elif [ "$(uname -s)" = Linux ]; then
        echo cpu
    else
        echo default
    fi
}

# has_torch PYTHON: is one there that will do?
has_torch() {
    "$1" - 2>/dev/null <<'PYTHON'
from importlib.metadata import version
import sys
sys.exit(tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 11))
PYTHON
}

# answers PYTHON URL: five seconds to say anything, then it is given up.
answers() {
    "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
        "$2/torch/" </dev/null >/dev/null 2>&1
}

# install_torch PYTHON VERSION LOG: torch alone; what it needs comes with llmd's own packages.
install_torch() {
    if has_torch "$1"; then
        return 0
    fi
    build=$(torch_build)
    case $build in
        cpu)
            if answers "$1" "$torch_cpu_index"; then
                say "installing torch $2 (CPU build, about 200 MB)"
                "$1" -m pip install --no-compile --no-deps --index-url "$torch_cpu_index" "torch==$2" \
                    </dev/null >>"$3" 2>&1 && return 0
            fi
            say "torch's CPU index can't be reached; installing torch $2 from the default one"
            ;;
        cuda) say "installing torch $2 (CUDA build for the NVIDIA GPU, about 3 GB)" ;;
        default) say "installing torch $2" ;;
        *) die "LLMD_TORCH is '$build'; set it to cpu or cuda, or leave it out." ;;
    esac
    "$1" -m pip install --no-compile --no-deps "torch==$2" </dev/null >>"$3" 2>&1
}
