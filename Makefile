# SPDX-License-Identifier: Apache-2.0
#
# kvmm's build. Sources are found by wildcard: a new file needs no line here.
# `make help` lists goals and knobs.

VERSION	:= 0.1.0
ABI	:= 0

# -- knobs --------------------------------------------------------------------

O	?= build
V	?=
SAN	?=
COV	?=
CUDA	?= auto
PREFIX	?= /usr/local
DESTDIR	?=
BENCH	?=

ifeq ($(origin CC),default)
CC	:= gcc
endif
FUZZCC	?= clang
OBJCOPY	?= objcopy
AR	:= ar

# Two builds never mix: each kind of instrumentation has a folder of its own.
comma	:= ,
B	:= $(O)$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))$(if $(COV),/cov)
Q	:= $(if $(V),,@)
silent	:= $(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
say	= $(if $(V)$(silent),,@printf '  %-7s %s\n' $(1) $(patsubst $(B)/%,%,$@))

# A -j on the command line wins over this one.
MAKEFLAGS += -j$(shell nproc) --no-builtin-rules
.SUFFIXES:
.SECONDARY:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

# -- flags --------------------------------------------------------------------

WARN	:= -Wall -Wextra -Werror -Wstrict-prototypes -Wmissing-prototypes \
	   -Wold-style-definition -Wvla -Wundef -Wpointer-arith \
	   -Wwrite-strings -Wformat-security -Wimplicit-fallthrough \
	   -Wno-unused-parameter -Wno-missing-field-initializers
ifneq ($(findstring clang,$(shell $(CC) --version 2>/dev/null)),)
WARN	+= -Wthread-safety
endif

# Baseline x86-64: what a newer CPU offers is chosen at run time. Shared memory
# is viewed through several types, hence no strict aliasing. A product is rounded
# before it is added, so that floats are the same with any instruction set.
COMMON	:= -std=gnu11 -D_GNU_SOURCE -DKVMM_VERSION_STRING='"$(VERSION)"' \
	   -I. -Ilibkvmm/include -g -fPIC -fvisibility=hidden \
	   -fno-strict-aliasing -ffp-contract=off -fstack-protector-strong \
	   -pthread $(WARN)
OPT	:= -O2
HARDEN	:= -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2
INSTR	:=
ifneq ($(SAN),)
# _FORTIFY_SOURCE hides calls from the sanitizers.
HARDEN	:= -U_FORTIFY_SOURCE
OPT	:= -O1
INSTR	+= -fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
ifneq ($(COV),)
OPT	:= -O0
HARDEN	:= -U_FORTIFY_SOURCE
INSTR	+= --coverage
endif

CFLAGS	?=
LDFLAGS	?=
REL_CFLAGS	= $(COMMON) $(OPT) $(HARDEN) $(INSTR) -DNDEBUG $(PKG_CFLAGS) $(CFLAGS)
TEST_CFLAGS	= $(COMMON) $(OPT) $(HARDEN) $(INSTR) -DKVMM_TEST_BUILD $(PKG_CFLAGS) $(CFLAGS)
LINK	= $(CC) $(INSTR) -pthread -Wl,--as-needed -Wl,-z,relro -Wl,-z,now $(LDFLAGS)

# Asked for when the first recipe needs it, since `make deps` may have to
# install the packages in this very run.
pkg	= $(shell pkg-config $(1) jansson libsystemd liburing)
PKG_CFLAGS	= $(eval PKG_CFLAGS := $(call pkg,--cflags))$(PKG_CFLAGS)
PKG_LIBS	= $(eval PKG_LIBS := $(call pkg,--libs))$(PKG_LIBS)
DAEMON_LIBS	= $(PKG_LIBS) -ldl
CTL_LIBS	= -ljansson
TEST_LIBS	= $(DAEMON_LIBS) -lcmocka -lcrypto -lzstd -lm

# The CUDA parts have no hard dependency: kernels/*.cu is compiled when nvcc is
# there (auto), must be (1), or is left out (0). libcuda is dlopen'ed.
NVCC	?= $(shell command -v nvcc 2>/dev/null)
CU_SRC	:= $(if $(filter 0,$(CUDA)),,$(if $(NVCC),$(wildcard kernels/*.cu)))
ifeq ($(CUDA)$(NVCC),1)
$(error CUDA=1, but there is no nvcc in the PATH (set NVCC=/path/to/nvcc, or CUDA=auto))
endif

# -- sources ------------------------------------------------------------------

IPC_SRC		:= $(wildcard ipc/*.c ipc/base/*.c)
LIB_SRC		:= $(wildcard libkvmm/*.c)
CTL_SRC		:= $(wildcard libkvmm/ctl/*.c)
KERN_SRC	:= $(wildcard kernels/*.c)
POLICY_SRC	:= $(wildcard policies/*.c)
DAEMON_MAIN	:= $(wildcard daemon/main.c)
DAEMON_SRC	:= $(filter-out daemon/main.c,$(wildcard daemon/*.c \
		     daemon/server/*.c daemon/mm/*.c daemon/node/*.c \
		     daemon/keeper/*.c))
# The policy that kvmmd carries inside and falls back to.
BUILTIN_SRC	:= $(wildcard policies/lru.c)
# Everything but main(), as tests and benches link it.
ALL_SRC		:= $(IPC_SRC) $(LIB_SRC) $(DAEMON_SRC) $(KERN_SRC) $(BUILTIN_SRC)
# The small inference engine of the tests; its programs have a main() each.
ENGINE_MAIN	:= $(wildcard tests/engine/engine_main.c)
ENGINE_SRC	:= $(filter-out %_main.c,$(wildcard tests/engine/*.c))
HELP_SRC	:= $(wildcard tests/lib/*.c) $(ENGINE_SRC)
UNIT_SRC	:= $(wildcard tests/unit/test_*.c)
INTEG_SRC	:= $(wildcard tests/integration/test_*.c)
# These run in a virtual machine only.
VM_SRC		:= $(wildcard tests/vm/test_*.c)
# Always sanitized, so an instrumented build need not have them once more.
FUZZ_SRC	:= $(if $(SAN)$(COV),,$(wildcard tests/fuzz/fuzz_*.c))
BENCH_SRC	:= $(wildcard tests/bench/bench_*.c)
BENCH_HELP	:= $(filter-out $(BENCH_SRC),$(wildcard tests/bench/*.c)) \
		     tests/lib/daemon.c tests/lib/engine_child.c tests/lib/trace.c \
		     $(ENGINE_SRC)
DEMO_SRC	:= $(wildcard tests/demo/demo*.c)
DEMO_HELP	:= $(filter-out $(DEMO_SRC),$(wildcard tests/demo/*.c)) \
		     tests/lib/daemon.c tests/lib/engine_child.c tests/lib/trace.c
SHELL_TESTS	:= $(wildcard tests/check-*.sh tests/*/test_*.sh)
LIB_MAP		:= $(wildcard libkvmm/libkvmm.map)

rel	= $(patsubst %.c,$(B)/obj/%.o,$(1))
tst	= $(patsubst %.c,$(B)/test/obj/%.o,$(1))
fzz	= $(patsubst %.c,$(B)/fuzz/obj/%.o,$(1))

SONAME		:= libkvmm.so.$(ABI)
SOREAL		:= libkvmm.so.$(VERSION)
LIBS		:= $(if $(LIB_SRC),$(B)/libkvmm.so $(B)/libkvmm.a)
POLICIES	:= $(POLICY_SRC:policies/%.c=$(B)/policies/%.so)
KVMMD		:= $(if $(DAEMON_MAIN),$(B)/kvmmd)
KVMMCTL		:= $(if $(CTL_SRC),$(B)/kvmmctl)
TEST_KVMMD	:= $(if $(DAEMON_MAIN),$(B)/test/kvmmd)
TEST_LIB	:= $(if $(LIB_SRC),$(B)/test/libkvmm.so)
UNIT		:= $(UNIT_SRC:tests/%.c=$(B)/test/%)
INTEG		:= $(INTEG_SRC:tests/%.c=$(B)/test/%)
VM		:= $(VM_SRC:tests/%.c=$(B)/test/%)
FUZZ		:= $(FUZZ_SRC:tests/%.c=$(B)/test/%)
BENCHES		:= $(BENCH_SRC:tests/bench/bench_%.c=$(B)/bench/%)
DEMOS		:= $(DEMO_SRC:tests/demo/%.c=$(B)/demo/%)
ENGINE		:= $(if $(ENGINE_MAIN),$(B)/engine)
TEST_ENGINE	:= $(if $(ENGINE_MAIN),$(B)/test/engine)

# -- what each goal builds ----------------------------------------------------

.PHONY: all deps demo check check-long check-model check-layers check-vm bench \
	install uninstall clean help tests

all: $(LIBS) $(KVMMD) $(KVMMCTL) $(POLICIES)

# Everything `make check` runs, built but not run.
tests: all $(TEST_KVMMD) $(TEST_LIB) $(UNIT) $(INTEG) $(FUZZ) $(DEMOS) \
	$(ENGINE) $(TEST_ENGINE)

# These goals install what is missing before anything compiles.
DEPS	:= $(if $(filter demo check check-long check-model check-vm bench,$(MAKECMDGOALS)),deps)

deps:
	$(Q).ci/deps $(filter bench,$(MAKECMDGOALS))

# -- compiling ----------------------------------------------------------------

# Changes when the compiler or its flags do, and then everything is rebuilt;
# the other one when a source comes or goes, and then everything is relinked.
$(B)/.flags: now = $(CC) $(FUZZCC) $(COMMON) $(OPT) $(HARDEN) $(INSTR) $(CFLAGS) $(LDFLAGS)
$(B)/.sources: now = $(ALL_SRC) $(CTL_SRC) $(HELP_SRC) $(BENCH_HELP) $(DEMO_HELP) $(CU_SRC)
$(B)/.flags $(B)/.sources: FORCE | $(DEPS)
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(now))' | cmp -s - $@ || \
		printf '%s\n' '$(subst ','\'',$(now))' >$@
.PHONY: FORCE

$(B)/obj/%.o: %.c $(B)/.flags
	$(call say,CC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(REL_CFLAGS) -MMD -MP -c -o $@ $<

$(B)/test/obj/%.o: %.c $(B)/.flags
	$(call say,CC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(TEST_CFLAGS) -MMD -MP -c -o $@ $<

$(B)/obj/%.cu.o: %.cu $(B)/.flags
	$(call say,NVCC)
	@mkdir -p $(@D)
	$(Q)$(NVCC) -O2 -g -Xcompiler -fPIC -I. -c -o $@ $<

# -- libkvmm ------------------------------------------------------------------

LIB_OBJ	:= $(LIB_SRC) $(IPC_SRC)
# A sanitized library leaves its run-time to the program that loads it.
ZDEFS	:= $(if $(SAN),,-Wl$(comma)-z$(comma)defs)
solink	= $(LINK) -shared -Wl,-soname,$(SONAME) $(ZDEFS) \
	  $(LIB_MAP:%=-Wl,--version-script=%) -o $@ $(filter %.o,$^)

$(B)/$(SOREAL): $(call rel,$(LIB_OBJ)) $(LIB_MAP) $(B)/.sources
	$(call say,LD)
	$(Q)$(solink)
$(B)/test/$(SOREAL): $(call tst,$(LIB_OBJ)) $(LIB_MAP) $(B)/.sources
	$(call say,LD)
	$(Q)$(solink)

$(B)/$(SONAME) $(B)/test/$(SONAME): %/$(SONAME): %/$(SOREAL)
	@ln -sf $(<F) $@
$(B)/libkvmm.so $(B)/test/libkvmm.so: %/libkvmm.so: %/$(SONAME)
	@ln -sf $(<F) $@

# One object, of which only the exported calls stay visible.
$(B)/libkvmm.a: $(call rel,$(LIB_OBJ)) $(B)/.sources
	$(call say,AR)
	$(Q)$(CC) -nostdlib -r -o $(B)/obj/libkvmm-one.o $(filter %.o,$^)
	$(Q)$(OBJCOPY) --localize-hidden $(B)/obj/libkvmm-one.o
	$(Q)rm -f $@ && $(AR) rcs $@ $(B)/obj/libkvmm-one.o

# -- programs -----------------------------------------------------------------

DAEMON_OBJ := $(DAEMON_MAIN) $(DAEMON_SRC) $(IPC_SRC) $(KERN_SRC) $(BUILTIN_SRC)
CU_OBJ	:= $(CU_SRC:%=$(B)/obj/%.o)

$(B)/kvmmd: $(call rel,$(DAEMON_OBJ)) $(CU_OBJ) $(B)/.sources
	$(call say,LD)
	$(Q)$(LINK) -pie -o $@ $(filter %.o,$^) $(DAEMON_LIBS)
$(B)/test/kvmmd: $(call tst,$(DAEMON_OBJ)) $(CU_OBJ) $(B)/.sources
	$(call say,LD)
	$(Q)$(LINK) -pie -o $@ $(filter %.o,$^) $(DAEMON_LIBS)

# Runs from the build folder and from $(PREFIX)/bin without ldconfig.
$(B)/kvmmctl: $(call rel,$(CTL_SRC)) $(B)/libkvmm.so $(B)/.sources
	$(call say,LD)
	$(Q)$(LINK) -pie -o $@ $(filter %.o,$^) -L$(B) -lkvmm $(CTL_LIBS) \
		-Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib'

# A policy sees policies/kvmm_policy.h and libc, nothing of kvmmd.
$(B)/policies/%.so: policies/%.c $(B)/.flags
	$(call say,LD)
	@mkdir -p $(@D) $(B)/obj/policies
	$(Q)$(LINK) $(REL_CFLAGS) -MMD -MP -MF $(B)/obj/policies/$*.so.d -MT $@ \
		-shared $(ZDEFS) -o $@ $<

# -- tests --------------------------------------------------------------------

# A source may ask its link for more: a line `/* link: -Wl,--wrap=open */`.
link_hint = $(shell sed -n 's,^/\* link: \(.*\) \*/$$,\1,p' $(1))

$(B)/test/libtest.a: $(call tst,$(ALL_SRC) $(HELP_SRC)) $(B)/.sources
	$(call say,AR)
	$(Q)rm -f $@ && $(AR) rcs $@ $(filter %.o,$^)
$(B)/librel.a: $(call rel,$(ALL_SRC) $(BENCH_HELP)) $(B)/.sources
	$(call say,AR)
	$(Q)rm -f $@ && $(AR) rcs $@ $(filter %.o,$^)

$(UNIT) $(INTEG) $(VM): $(B)/test/%: $(B)/test/obj/tests/%.o $(B)/test/libtest.a
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(LINK) -o $@ $^ $(call link_hint,tests/$*.c) $(TEST_LIBS)

# libFuzzer where clang has it; else the same targets behind a driver that
# replays the corpus and mutates it. Address and undefined are always on there.
FUZZ_CFLAGS	= $(COMMON) -O1 -U_FORTIFY_SOURCE -DKVMM_TEST_BUILD $(PKG_CFLAGS)
FUZZ_SAN	:= -fsanitize=address,undefined -fno-sanitize-recover=all

fuzz_cc_libfuzzer = $(FUZZCC) $(FUZZ_SAN) -fsanitize=fuzzer-no-link
fuzz_cc_driver	= $(CC) $(FUZZ_SAN)
fuzz_ld_libfuzzer = $(FUZZCC) $(FUZZ_SAN) -fsanitize=fuzzer
fuzz_ld_driver	= $(CC) $(FUZZ_SAN) $(B)/fuzz/obj/tests/fuzz/driver.o
fuzz_mode	= $(shell cat $(B)/fuzz/mode)
fuzz_cc		= $(fuzz_cc_$(fuzz_mode))
fuzz_ld		= $(fuzz_ld_$(fuzz_mode)) -pthread -Wl,--as-needed

$(B)/fuzz/mode: $(B)/.flags
	@mkdir -p $(@D)
	@if echo 'int LLVMFuzzerTestOneInput(const char *p, long n) { return !p && n; }' | \
		$(fuzz_ld_libfuzzer) -x c - -o $(B)/fuzz/probe 2>/dev/null; \
	then echo libfuzzer >$@; else echo driver >$@; fi; rm -f $(B)/fuzz/probe

$(B)/fuzz/obj/%.o: %.c $(B)/.flags $(B)/fuzz/mode
	$(call say,CC)
	@mkdir -p $(@D)
	$(Q)$(fuzz_cc) $(filter-out -Wthread-safety,$(FUZZ_CFLAGS)) -MMD -MP -c -o $@ $<

$(B)/fuzz/libfuzz.a: $(call fzz,$(ALL_SRC) $(HELP_SRC)) $(B)/.sources
	$(call say,AR)
	$(Q)rm -f $@ && $(AR) rcs $@ $(filter %.o,$^)

$(FUZZ): $(B)/test/fuzz/%: $(B)/fuzz/obj/tests/fuzz/%.o \
		$(B)/fuzz/obj/tests/fuzz/driver.o $(B)/fuzz/libfuzz.a
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(fuzz_ld) -o $@ $< $(B)/fuzz/libfuzz.a \
		$(call link_hint,tests/fuzz/$*.c) $(TEST_LIBS)

RUN	= V='$(V)' SAN='$(SAN)' tests/run.sh -b $(B)
SMALL_MODEL := $(if $(wildcard tests/model/run.sh),"tests/model/run.sh --small")

check: tests | $(DEPS)
	$(Q)$(RUN) $(SHELL_TESTS) $(UNIT) $(INTEG) $(FUZZ) $(SMALL_MODEL)

check-long: tests | $(DEPS)
	$(Q)KVMM_TEST_LONG=1 $(RUN) $(SHELL_TESTS) $(UNIT) $(INTEG) $(FUZZ) $(SMALL_MODEL)

check-model: | $(DEPS)
	$(Q)$(RUN) -t 7200 tests/model/run.sh

# Slow, since it is all emulated, and for what cannot be had otherwise: a real
# systemd, a device that is taken away, a power cut.
check-vm: all $(TEST_KVMMD) $(TEST_LIB) $(VM) | $(DEPS)
	$(Q)$(RUN) -t 7200 tests/vm/run.sh

check-layers:
	$(Q)tests/check-layers.sh

# -- the engine ----------------------------------------------------------------

# A client like any other: it links libkvmm, and nothing else of the project but
# the reader of recorded requests.
ENGINE_ALL	:= $(ENGINE_MAIN) $(ENGINE_SRC) tests/lib/trace.c
englink = $(LINK) -o $@ $(filter %.o,$^) -L$(@D) -lkvmm -ljansson -lzstd -lm \
	  -Wl,-rpath,'$$ORIGIN'

$(ENGINE): $(call rel,$(ENGINE_ALL)) $(B)/libkvmm.so $(B)/.sources
	$(call say,LD)
	$(Q)$(englink)
$(TEST_ENGINE): $(call tst,$(ENGINE_ALL)) $(B)/test/libkvmm.so \
		$(B)/.sources
	$(call say,LD)
	$(Q)$(englink)

# -- benches and demo ---------------------------------------------------------

$(BENCHES): $(B)/bench/%: $(B)/obj/tests/bench/bench_%.o $(B)/librel.a
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(LINK) -o $@ $^ $(call link_hint,tests/bench/bench_$*.c) $(TEST_LIBS)

# It tells its daemon to have a device stall, which only that one can.
$(B)/bench/stall: | $(TEST_KVMMD)

# Each bench prints progress to stderr and one line of JSON last on stdout.
bench: all $(ENGINE) $(if $(BENCH),$(B)/bench/$(BENCH),$(BENCHES)) | $(DEPS)
	$(Q)t=$$(mktemp -d "$${TMPDIR:-/var/tmp}/kvmm-bench.XXXXXX") || exit 1; \
	trap 'rm -rf "$$t"' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	rc=0; for b in $(if $(BENCH),$(B)/bench/$(BENCH),$(BENCHES)); do \
		KVMM_BUILD=$(abspath $(B)) KVMMD=$(abspath $(B)/kvmmd) \
			TMPDIR="$$t" $$b >$$b.out || rc=1; \
		tail -n 1 $$b.out >$$b.json; cat $$b.json; \
	done; exit $$rc

# Programs of the demo are clients like any other: they link libkvmm.
$(B)/demo/libdemo.a: $(call rel,$(DEMO_HELP)) $(B)/.sources
	@mkdir -p $(@D)
	$(Q)rm -f $@ && $(AR) rcs $@ $(filter %.o,$^)
$(DEMOS): $(B)/demo/%: $(B)/obj/tests/demo/%.o $(B)/demo/libdemo.a $(B)/libkvmm.so
	$(call say,LD)
	$(Q)$(LINK) -o $@ $(filter %.o,$^) $(B)/demo/libdemo.a -L$(B) -lkvmm \
		-ljansson -lzstd -lm -Wl,-rpath,'$$ORIGIN/..'

demo: all $(DEMOS) $(ENGINE) | $(DEPS)
	$(Q)KVMM_BUILD=$(abspath $(B)) KVMMD=$(abspath $(B)/kvmmd) \
		KVMMCTL=$(abspath $(B)/kvmmctl) \
		$(if $(wildcard tests/demo/run.sh),tests/demo/run.sh,$(B)/demo/demo)

# -- install ------------------------------------------------------------------

BINDIR	?= $(PREFIX)/bin
LIBDIR	?= $(PREFIX)/lib
INCDIR	?= $(PREFIX)/include
MANDIR	?= $(PREFIX)/share/man
UNITDIR	?= $(PREFIX)/lib/systemd/system
POLDIR	?= $(PREFIX)/lib/kvmm/policies

HEADERS	:= $(wildcard libkvmm/include/kvmm/*.h)
MANS	:= $(wildcard libkvmm/man/*.[1-8] daemon/man/*.[1-8])
UNITS	:= $(wildcard systemd/*.service systemd/*.socket systemd/*.slice)
# Files that go to the folder of the same name: sysusers.d, tmpfiles.d.
SYSD	:= $(wildcard systemd/sysusers.d/*.conf systemd/tmpfiles.d/*.conf)
# Configuration is the operator's once it is there, so it is never replaced.
CONFS	:= $(wildcard systemd/*.json)
CONFDIR	?= /etc/kvmm
D	= $(DESTDIR)

install: all
	$(Q)install -d $(D)$(BINDIR) $(D)$(LIBDIR)/pkgconfig $(D)$(INCDIR)/kvmm
	$(Q)install -m 755 $(B)/kvmmd $(B)/kvmmctl $(D)$(BINDIR)
	$(Q)install -m 755 $(B)/$(SOREAL) $(D)$(LIBDIR)
	$(Q)ln -sf $(SOREAL) $(D)$(LIBDIR)/$(SONAME)
	$(Q)ln -sf $(SONAME) $(D)$(LIBDIR)/libkvmm.so
	$(Q)install -m 644 $(B)/libkvmm.a $(D)$(LIBDIR)
	$(Q)install -m 644 $(HEADERS) $(D)$(INCDIR)/kvmm
	$(Q)sed 's|@prefix@|$(PREFIX)|; s|@libdir@|$(LIBDIR)|; s|@includedir@|$(INCDIR)|; s|@version@|$(VERSION)|' \
		libkvmm/kvmm.pc.in >$(D)$(LIBDIR)/pkgconfig/kvmm.pc
	$(Q)install -d $(D)$(POLDIR) && install -m 644 $(POLICIES) $(D)$(POLDIR)
	$(Q)for m in $(MANS); do install -D -m 644 $$m \
		$(D)$(MANDIR)/man$${m##*.}/$${m##*/} || exit 1; done
	$(Q)for u in $(UNITS); do install -d $(D)$(UNITDIR) && \
		sed 's|/usr/bin/|$(BINDIR)/|' $$u >$(D)$(UNITDIR)/$${u##*/} && \
		chmod 644 $(D)$(UNITDIR)/$${u##*/} || exit 1; done
	$(Q)for f in $(SYSD:systemd/%=%); do \
		install -D -m 644 systemd/$$f $(D)$(PREFIX)/lib/$$f || exit 1; done
	$(Q)for c in $(notdir $(CONFS)); do [ -e $(D)$(CONFDIR)/$$c ] || \
		install -D -m 644 systemd/$$c $(D)$(CONFDIR)/$$c || exit 1; done

# Leaves the configuration, as a package that is removed and not purged.
uninstall:
	$(Q)rm -f $(D)$(BINDIR)/kvmmd $(D)$(BINDIR)/kvmmctl \
		$(D)$(LIBDIR)/$(SOREAL) $(D)$(LIBDIR)/$(SONAME) \
		$(D)$(LIBDIR)/libkvmm.so $(D)$(LIBDIR)/libkvmm.a \
		$(D)$(LIBDIR)/pkgconfig/kvmm.pc \
		$(POLICY_SRC:policies/%.c=$(D)$(POLDIR)/%.so) \
		$(foreach u,$(notdir $(UNITS)),$(D)$(UNITDIR)/$(u)) \
		$(SYSD:systemd/%=$(D)$(PREFIX)/lib/%) \
		$(foreach m,$(MANS),$(D)$(MANDIR)/man$(subst .,,$(suffix $(m)))/$(notdir $(m)))
	$(Q)rm -rf $(D)$(INCDIR)/kvmm
	$(Q)rmdir -p --ignore-fail-on-non-empty $(D)$(POLDIR) 2>/dev/null || true

clean:
	$(Q)rm -rf $(O)

help:
	@echo 'goals: all          libkvmm, kvmmd, kvmmctl, policies (the default)'
	@echo '       deps         install the Debian packages that are missing'
	@echo '       demo         four processes share prefixes through kvmmd'
	@echo '       check        every test, in seeded samples; check-long: full counts'
	@echo '       check-model  the protocol models in full; check-layers: includes only'
	@echo '       check-vm     under systemd, on NVMe that fails, in a virtual machine'
	@echo '       bench        all benches, or one with BENCH=name'
	@echo '       tests        build what check runs, run nothing'
	@echo '       install, uninstall (PREFIX= DESTDIR=), clean, help'
	@echo 'knobs: V=1  show commands        O=dir  output folder (build)'
	@echo '       SAN=address,undefined | thread    COV=1  gcov'
	@echo '       CUDA=auto|0|1             CC=gcc|clang, CFLAGS, LDFLAGS'

-include $(shell find $(B)/obj $(B)/test/obj $(B)/fuzz/obj -name '*.d' 2>/dev/null)
