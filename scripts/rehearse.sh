#!/usr/bin/env bash
# Rehearses first contact: clones HEAD, empties the home and every cache, runs the README's two commands, times each stage.
set -u

usage() {
    cat << 'END'
scripts/rehearse.sh [options]      (make rehearse REHEARSE='options')

  -n COUNT       make run COUNT times, each in a fresh clone with an empty home; no make test
  --run          make run alone, once
  --fast         with -n: set up once; each time the home is emptied and the model fetched anew (what is compiled is kept)
  --cut SECONDS  the network is cut so long after its first byte: one sentence, nothing left over, the second run works
  --uv           uv in the place of venv and pip
  --keep         leave the folder there
  --in FOLDER    with --fast: go on in a folder that --fast --keep left, which is set up

pip's own configuration (PIP_* variables and the user's file) is kept, for it says where packages come from; uv is told the same.
PYTHON=/path/to/python3.12 chooses the interpreter.
END
}

count=1 tests=1 fast= cut= uv= keep= place=
while [ $# -gt 0 ]; do
    case $1 in
        -n) count=$2 tests= ; shift ;;
        --run) tests= ;;
        --fast) fast=1 tests= ;;
        --cut) cut=$2 tests= ; shift ;;
        --uv) uv=1 ;;
        --keep) keep=1 ;;
        --in) place=$2 keep=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done

here=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "there is no ${PYTHON:-python3}" >&2; exit 2; }
place=${place:-$(mktemp -d "${TMPDIR:-/tmp}/rehearsal-XXXXXX")}
proxy=
leave() {
    [ -z "$proxy" ] || kill "$proxy" 2> /dev/null
    [ -n "$keep" ] && echo "everything is in $place" || rm -rf "$place"
}
trap leave EXIT
trap 'exit 130' INT TERM

# What a rehearsal may know of this machine: where programs and packages are to be had. Caches are not among it.
known=(PATH="$PATH" LANG="${LANG:-C.UTF-8}" HOME="$place/home" TMPDIR="$place/tmp")
while IFS='=' read -r name _; do
    case $name in
        PIP_CACHE_DIR | UV_CACHE_DIR) ;;
        PIP_* | UV_* | SSL_CERT_* | REQUESTS_CA_BUNDLE | *_proxy | *_PROXY) known+=("$name=${!name}") ;;
    esac
done < <(env)
for file in "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" "$HOME/.pip/pip.conf"; do
    [ -z "${PIP_CONFIG_FILE:-}" ] && [ -f "$file" ] && known+=(PIP_CONFIG_FILE="$file") && break
done
if [ -n "$uv" ]; then  # which does not read pip's configuration
    setting() { "$python" -m pip config list 2> /dev/null | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | tail -n 1; }
    [ -z "$(setting index-url)" ] || known+=(UV_DEFAULT_INDEX="$(setting index-url)")
    [ -z "$(setting extra-index-url)" ] || known+=(UV_INDEX="$(setting extra-index-url)" UV_INDEX_STRATEGY=unsafe-best-match)
    [ -z "$(setting find-links)" ] || known+=(UV_FIND_LINKS="$(setting find-links)")
    [ -z "$(setting cert)" ] || known+=(SSL_CERT_FILE="$(setting cert)")
fi

failed=0
stage() { # NAME COMMAND...: runs it, tells how it ended and how long it took
    local name=$1 began ended
    shift
    began=$(date +%s.%N)
    "$@" > "$place/log" 2>&1
    status=$?
    ended=$(date +%s.%N)
    seconds=$(awk "BEGIN { printf \"%.1f\", $ended - $began }")
    printf '%-4s %8s s  %s\n' "$([ $status -eq 0 ] && echo ok || echo "$status")" "$seconds" "$name"
}
must() { # as stage, and a failure is one of the rehearsal
    stage "$@"
    [ $status -eq 0 ] || wrong "$1 ended with $status"
}
wrong() {
    failed=$((failed + 1))
    echo "     wrong: $1"
    tail -n 15 "$place/log" | sed 's/^/     | /'
}
emptied() {
    rm -rf "$place/home" "$place/tmp"
    mkdir -p "$place/home" "$place/tmp"
}
cloned() {
    rm -rf "$place/clone"
    git clone --quiet "$here" "$place/clone"
}
made() { env -i "${known[@]}" make -C "$place/clone" --no-print-directory PYTHON="$python" ${uv:+UV=1} "$@"; }
clean_models() { # nothing half-made may lie beside the model, but for what the next run goes on with
    local found
    found=$(find "$place/home" "$place/tmp" \( -name 'download-*' -o -name 'verified-*' -o -name 'pip-*' \) -print -quit)
    [ -z "$found" ] || wrong "$found was left behind"
}

echo "HEAD is $(git -C "$here" rev-parse --short HEAD), Python $("$python" -c 'import platform; print(platform.python_version())')${uv:+, uv}"
emptied
if [ -n "$fast" ] && [ ! -d "$place/native" ]; then
    must "clone" cloned
    must "set up" made .venv/.installed
    must "make run, which compiles" made run
    mv "$place/home/.cache/tokenmill/native" "$place/native"
fi
for number in $(seq "$count"); do
    emptied
    [ "$count" -eq 1 ] || echo "-- $number of $count"
    if [ -n "$fast" ]; then
        mkdir -p "$place/home/.cache/tokenmill" && cp -r "$place/native" "$place/home/.cache/tokenmill/"
    else
        must "clone" cloned
    fi
    if [ -n "$cut" ]; then
        "$python" "$here/scripts/cut_proxy.py" "$place/port" --seconds "$cut" > "$place/proxy.log" &
        proxy=$!
        until [ -s "$place/port" ]; do sleep 0.05; done
        known+=(REHEARSAL_PROXY="${HTTPS_PROXY:-${https_proxy:-}}" NO_PROXY= no_proxy=)
        for name in HTTPS_PROXY HTTP_PROXY https_proxy http_proxy; do
            known+=("$name=http://127.0.0.1:$(cat "$place/port")")
        done
        stage "make run, cut after $cut s" made run
        [ $status -ne 0 ] || wrong "the network was cut, and make run did not mind"
        [ "$(grep -c '^error: ' "$place/log")" -eq 1 ] || wrong "there is not one sentence"
        grep '^error: ' "$place/log" | sed 's/^/     | /'
        clean_models
        kill -USR1 "$proxy"
        must "make run, with the network back" made run
        kill "$proxy" && wait "$proxy"
        proxy=
        sed 's/^/     | /' "$place/proxy.log"
        rm "$place/port"
    else
        must "make run" made run
    fi
    grep -q 4 <(tail -n 3 "$place/log") || wrong "2 + 2 was not answered"
    clean_models
    [ -z "$tests" ] || must "make test" made test
done
[ $failed -eq 0 ] && echo "passed" || echo "$failed things were wrong"
exit $((failed > 0))
