#!/bin/sh
# Installs llmd for this user: no root, nothing outside the home folder.
#
#   installers/install.sh               install, or bring up to date
#   installers/install.sh --dry-run     say what would be done
#   installers/install.sh --uninstall   remove the program; models and chats stay
#
# A private environment stands in the user's data folder, and a link to `llmd` in ~/.local/bin.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# shellcheck source=installers/environment.sh
. "$root/installers/environment.sh"

case $(uname -s) in
    Darwin)
        data="$HOME/Library/Application Support/llmd"
        cache="$HOME/Library/Caches/llmd"
        ;;
    *)
        data="${XDG_DATA_HOME:-$HOME/.local/share}/llmd"
        cache="${XDG_CACHE_HOME:-$HOME/.cache}/llmd"
        ;;
esac
environment_folder="$data/environment"
log_file="$data/install.log"
link="$HOME/.local/bin/llmd"

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; }

main() {
    action=install
    is_dry=no
    for argument in "$@"; do
        case $argument in
            --uninstall) action=uninstall ;;
            --dry-run) is_dry=yes ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) die "unknown argument '$argument'; try --help." ;;
        esac
    done
    if [ "$is_dry" = yes ]; then
        "describe_$action"
    else
        "$action"
    fi
}

describe_install() {
    find_python
    check_venv_module
    check_space "$environment_folder"
    say "would make an environment in $environment_folder with $($python --version)"
    say "would install torch $(sed -n 's/^torch==//p' "$root/constraints.txt"), build: $(torch_build)"
    say "would link $link"
}

describe_uninstall() {
    say "would stop the daemon and remove $environment_folder, $cache and $link"
}

install() {
    check_link
    source_copy=$(mktemp -d)
    trap 'rm -rf "$source_copy"' EXIT
    # A copy: building leaves files in the tree it builds, and this one may be read-only.
    (cd "$root" && tar cf - --exclude ./.git --exclude ./.venv --exclude ./build .) |
        tar xf - -C "$source_copy"
    make_environment "$environment_folder" user "$log_file" --upgrade "$source_copy"
    mkdir -p "$(dirname "$link")"
    ln -sfn "$environment_folder/bin/llmd" "$link"
    say "installed $("$link" --version 2>/dev/null | tail -n 1)"
    case ":$PATH:" in
        *":$(dirname "$link"):"*) say "try: llmd run smollm2" ;;
        *) say "$(dirname "$link") is not on your PATH; add it, or run $link run smollm2" ;;
    esac
}

# Another program's `llmd` is not overwritten.
check_link() {
    if [ -e "$link" ] || [ -L "$link" ]; then
        is_ours || die "$link exists and is not this program's; move it away and try again."
    fi
}

is_ours() {
    [ -L "$link" ] && [ "$(readlink "$link")" = "$environment_folder/bin/llmd" ]
}

uninstall() {
    # A daemon that runs on would hold its models and have no code any more.
    "$environment_folder/bin/llmd" stop </dev/null >/dev/null 2>&1 || true
    if is_ours; then rm -f "$link"; fi
    rm -rf "$environment_folder" "$log_file" "$cache"
    if [ -d "$data/models" ]; then
        say "removed; your models are still in $data/models"
    else
        say "removed"
    fi
}

main "$@"
