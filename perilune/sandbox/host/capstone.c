// Stands in for libcapstone in QEMU's process: a disassembler for its debugging logs, which are never written. The real
// one has 1.4 MB of tables that every process would relocate, and so own, at its start.
#include <stddef.h>

#define UNSUPPORTED 1  // any error says that there is no disassembler

int cs_open(int arch, int mode, size_t *handle) { return (void)arch, (void)mode, *handle = 0, UNSUPPORTED; }
int cs_close(size_t *handle) { return (void)handle, UNSUPPORTED; }
int cs_option(size_t handle, int type, size_t value) { return (void)handle, (void)type, (void)value, UNSUPPORTED; }
void *cs_malloc(size_t handle) { return (void)handle, NULL; }
_Bool cs_disasm_iter(size_t handle, const void *code, size_t *size, void *address, void *insn) {
  return (void)handle, (void)code, (void)size, (void)address, (void)insn, 0;
}
