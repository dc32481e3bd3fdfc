#!/bin/sh
# What the whole test suite needs besides Python: Prometheus, Alertmanager, a C compiler (for the
# fake NVML library), Node.js (tsc checks the dashboards). Installed here when root and missing.
set -eu
missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need prometheus prometheus
need promtool prometheus
need prometheus-alertmanager prometheus-alertmanager
need amtool prometheus-alertmanager
need cc gcc
need npm npm
cc_headers=/usr/include/stdio.h
[ -e "$cc_headers" ] || missing="$missing libc6-dev"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing for the tests:$missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null
  # shellcheck disable=SC2086 - a list on purpose
  apt-get install -y -q --no-install-recommends $missing >/dev/null
  exit 0
fi
echo "The tests need these packages:$missing" >&2
echo "Install them:  sudo apt-get install$missing" >&2
echo "or run the tests that need none of them:  make test-fast" >&2
exit 1
