#!/usr/bin/env bash
# Makes an authority and certificates that it signs, for trying out TLS. See usage() below.
set -euo pipefail

readonly DAYS=30

usage() {
  cat <<EOF
Usage: ${0##*/} DIRECTORY [HOST…]

Makes an authority, a server's certificate for each HOST (names or IP addresses by which clients call
it; by default localhost, 127.0.0.1, ::1 and this machine's name), a client's certificate, and a token:

  ca.pem                   --tls_ca of both sides (of the learner: to check its actors' certificates)
  server.pem, server.key   --tls_certificate and --tls_key of the learner
  client.pem, client.key   --tls_certificate and --tls_key of the actors, for mutual TLS
  token                    --token_file of both sides
  ca.key                   the authority's: whoever has it can make certificates; goes nowhere

They are for tests and last $DAYS days. DIRECTORY is made, and must be empty. It gets mode 0700.
EOF
}

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# alternative_names HOST…: as openssl's subjectAltName takes them.
alternative_names() {
  local host names=()
  for host in "$@"; do
    if [[ "$host" == *:* || "$host" =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
      names+=("IP:$host")
    else
      names+=("DNS:$host")
    fi
  done
  local IFS=,
  printf '%s\n' "${names[*]}"
}

make_key() {
  openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null ||
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

make_authority() {
  make_key ca.key
  openssl req -x509 -new -key ca.key -days "$DAYS" -subj "/CN=seed_rl test authority" -out ca.pem \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
}

# make_certificate NAME USAGE [ALTERNATIVE_NAMES]: NAME.pem and NAME.key, signed by the authority.
make_certificate() {
  local extensions="extendedKeyUsage=$2" words
  [[ -z "${3:-}" ]] || extensions+=$'\n'"subjectAltName=$3"
  make_key "$1.key"
  openssl req -new -key "$1.key" -subj "/CN=seed_rl test $1" -out request.pem
  # It says on standard error, too, that all is well.
  words="$(openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days "$DAYS" \
    -out "$1.pem" -extfile <(printf '%s\n' "$extensions") 2>&1)" ||
    fail "could not make a certificate for '${3:-}': each HOST has to be a name or an IP address." \
      "openssl says: $(reason_in "$words")"
  rm request.pem
}

# reason_in WORDS: of openssl's report the part for people, or all of it if there is none.
reason_in() {
  local reason
  reason="$(sed -n 's/^[^:]*:error:[^:]*:[^:]*:[^:]*:\([^:]*\):.*/\1/p' <<<"$1")"
  printf '%s' "${reason%%$'\n'*}"
  [[ -n "$reason" ]] || printf '%s' "$1"
}

# remove_half: a directory with half of the files would be taken by nobody, neither here nor there.
# shellcheck disable=SC2329 # a trap calls it
remove_half() {
  [[ $? -eq 0 ]] || rm -f ca.key ca.pem ca.srl {server,client}.{key,pem} request.pem token
}

main() {
  if [[ $# -eq 0 || "$1" == -* ]]; then
    usage
    [[ "${1:-}" == -h || "${1:-}" == --help ]] && exit 0
    exit 2
  fi
  command -v openssl >/dev/null || fail "needs openssl on PATH (Debian, Ubuntu: apt-get install openssl)"
  local directory=$1
  shift
  [[ $# -gt 0 ]] || set -- localhost 127.0.0.1 ::1 "$(hostname)"
  umask 077
  mkdir -p "$directory" 2>/dev/null || fail "could not make the directory '$directory'"
  cd "$directory"
  [[ -z "$(ls -A)" ]] || fail "$directory is not empty: give another, or delete what is in it"
  chmod 700 .
  trap remove_half EXIT
  make_authority
  make_certificate server serverAuth "$(alternative_names "$@")"
  make_certificate client clientAuth
  openssl rand -hex 32 >token
  rm -f ca.srl
}

main "$@"
