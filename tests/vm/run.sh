#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh [NAME...] - tests that need a machine of their own: a real systemd, an
# NVMe device that can be taken away, made slow and made to lie, and a power
# switch. Each runs in a virtual machine that is thrown away (vmrun).
#
# A test is tests/vm/guest_NAME.sh, or a program tests/vm/test_NAME.c, which is
# built like an integration test. Both run as root in a folder that holds
# what the build made, and say in TAP lines what they did. One whose text asks for
# it by `# boots: 2` runs as often, each time in a machine that was just switched
# on, over the same disk; it is told which time it is by KVMM_BOOT.
set -u

src=$(cd "$(dirname "$0")/../.." && pwd) || exit 1
build=$(cd "${KVMM_BUILD:-$src/build}" && pwd) || exit 1
vmrun=$src/tests/vm/vmrun
limit=${KVMM_VM_SECS:-600}		# one machine, under emulation

for tool in qemu-system-x86_64 mmdebstrap mke2fs debugfs; do
	if ! PATH=$PATH:/sbin:/usr/sbin command -v $tool >/dev/null; then
		echo "there is no $tool here: a test machine needs the packages" \
			"qemu-system-x86, mmdebstrap and e2fsprogs"
		exit 77
	fi
done
export PATH=$PATH:/sbin:/usr/sbin
export PACKAGES="dmsetup libcmocka0 libssl3 libzstd1 xfsprogs btrfs-progs"
export VMRUN_CACHE=${VMRUN_CACHE:-$build/vm/cache}

work=$(mktemp -d "${TMPDIR:-/tmp}/kvmm-vm.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if ! "$vmrun" -b >"$work/image.log" 2>&1; then
	tail -5 "$work/image.log"
	echo "no image could be made: is a Debian mirror within reach?"
	exit 77
fi

# What goes into the machine.
pack=$work/pack
mkdir -p "$pack/test" "$pack/root"
cp -a "$build/test/kvmmd" "$build"/test/libkvmm.so* "$pack/test/"
cp -a "$build/kvmmctl" "$build"/libkvmm.so* "$pack/"
cp -a "$build/policies" "$pack/"
cp -a "$build"/test/vm "$pack/test/" 2>/dev/null
cp -a "$src"/tests/vm/guest*.sh "$pack/"
make -s -C "$src" O="$build" DESTDIR="$pack/root" PREFIX=/usr install \
	>"$work/install.log" 2>&1 || { cat "$work/install.log"; exit 1; }

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
	for f in "$src"/tests/vm/guest_*.sh "$src"/tests/vm/test_*.c; do
		[ -e "$f" ] || continue
		f=${f##*/}
		f=${f#guest_}
		f=${f#test_}
		names+=("${f%.*}")
	done
fi

failed=0
one() {
	local name=$1 file command boots boot rc disk=$work/disk
	if [ -e "$src/tests/vm/guest_$name.sh" ]; then
		file=$src/tests/vm/guest_$name.sh
		command=(bash "./guest_$name.sh")
	else
		file=$src/tests/vm/test_$name.c
		command=("./test/vm/test_$name")
	fi
	boots=$(sed -n 's/.* boots: \([0-9]*\).*/\1/p' "$file")
	rm -f "$disk"
	for ((boot = 1; boot <= ${boots:-1}; boot++)); do
		"$vmrun" -d "$pack" -n "$disk" -t "$limit" -- \
			env KVMM_BOOT=$boot KVMMD=/host/test/kvmmd \
			KVMMCTL=/host/kvmmctl KVMM_POLICY_DIR=/host/policies \
			KVMM_SRC=/host KVMM_BUILD=/host TMPDIR=/var/tmp \
			KVMM_TEST_SEED="${KVMM_TEST_SEED:-1}" \
			${KVMM_TEST_LONG:+KVMM_TEST_LONG=1} \
			${KVMM_TEST_ONLY:+KVMM_TEST_ONLY="$KVMM_TEST_ONLY"} \
			CMOCKA_MESSAGE_OUTPUT=TAP "${command[@]}" \
			2>"$work/vm.err"
		rc=$?
		# a power cut leaves no status, and all but the last end in one
		if [ $boot -lt "${boots:-1}" ]; then
			[ $rc -eq 125 ] && continue
			echo "not ok $boot - $name: it was to end in a power cut, and said $rc"
		elif [ $rc -eq 0 ]; then
			continue
		else
			echo "not ok $boot - $name: exit status $rc"
		fi
		sed 's/^/# /' "$work/vm.err"
		failed=1
		return
	done
}

for name in "${names[@]}"; do
	echo "# $name"
	one "$name"
done
exit $failed
