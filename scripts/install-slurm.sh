#!/bin/sh
# Installs what `allranks cluster up` needs from Debian or Ubuntu packages, and starts nothing.
#
#   scripts/install-slurm.sh                 slurmctld, slurmd, the client commands, munge
#   scripts/install-slurm.sh --accounting    also slurmdbd and MariaDB, for `cluster up --accounting`
#   scripts/install-slurm.sh --check         says what is missing, installs nothing
#
# Exit 0: all there. Exit 3: this machine cannot have them; the message says why and what to do.
# The daemons of the packages are neither started now nor at the next boot: the box starts its own.
# A machine that has its own Slurm configuration is left alone.
set -eu

PATH="$PATH:/usr/sbin:/sbin"
POLICY=/usr/sbin/policy-rc.d
SAVED="$POLICY.before-allranks"

not_able() {
    printf 'install-slurm: %s\n' "$*" >&2
    exit 3
}

packages="munge slurm-wlm iproute2 util-linux hostname"
programs="munged slurmctld slurmd slurmstepd srun sbatch scontrol ip tc nsenter unshare setsid setpriv hostname"
services="munge slurmctld slurmd"
check_only=no
for word in "$@"; do
    case "$word" in
        --accounting)
            packages="$packages slurmdbd mariadb-server"
            programs="$programs slurmdbd mariadbd mariadb-install-db"
            services="$services slurmdbd mariadb"
            ;;
        --check) check_only=yes ;;
        *) printf 'install-slurm: unknown option %s (known: --accounting, --check)\n' "$word" >&2; exit 2 ;;
    esac
done

missing=""
for program in $programs; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -z "$missing" ] && exit 0

hint="Needed are the Debian packages: $packages."
[ "$check_only" = yes ] && not_able "missing:$missing. $hint"
[ "$(id -u)" -eq 0 ] || not_able "missing:$missing, and only root may install them. Run: sudo $0 $*"
command -v apt-get >/dev/null 2>&1 || not_able "missing:$missing, and there is no apt-get here. $hint"
for conf in /etc/slurm/slurm.conf /etc/slurm-llnl/slurm.conf; do
    [ -e "$conf" ] && not_able "missing:$missing, but $conf says that this machine belongs to a Slurm already; \
its packages are its administrator's business. $hint"
done

# Services that are already here keep running and stay enabled; only the new ones are kept from starting.
new_services=""
for service in $services; do
    dpkg-query -W -f '${Status}\n' "$service" "$service-server" 2>/dev/null | grep -q 'ok installed' ||
        new_services="$new_services $service"
done

restore() {
    rm -f "$POLICY"
    [ -e "$SAVED" ] && mv "$SAVED" "$POLICY"
    return 0
}

# A run that was killed left ours in place: put the machine's own back before anything else.
if [ -e "$SAVED" ]; then
    restore
elif grep -qs 'written by allranks' "$POLICY"; then
    rm -f "$POLICY"
fi
[ -e "$POLICY" ] && mv "$POLICY" "$SAVED"
trap restore EXIT
trap 'exit 130' HUP INT TERM
printf '#!/bin/sh\n# written by allranks install-slurm.sh while it runs; removed at its end\nexit 101\n' >"$POLICY"
chmod 755 "$POLICY"

export DEBIAN_FRONTEND=noninteractive
apt() { apt-get -q -o DPkg::Lock::Timeout=120 "$@" </dev/null >&2; }
# shellcheck disable=SC2086 # the list is meant to be split
install() { apt install -y --no-install-recommends $packages; }
if ! install; then
    apt update || true
    install || not_able "apt-get could not install $packages (see above). Is a package mirror reachable?"
fi

if command -v systemctl >/dev/null 2>&1; then
    for service in $new_services; do
        systemctl disable "$service" >/dev/null 2>&1 || true
    done
fi
still=""
for program in $programs; do
    command -v "$program" >/dev/null 2>&1 || still="$still $program"
done
[ -z "$still" ] || not_able "installed, but still missing:$still"
printf 'install-slurm: done, nothing was started\n' >&2
