/* Preloaded into the embedded llama.cpp server: the chunk of the next step, while it runs.
 *
 * The server asks llama_n_batch() in every step how many tokens it may put into it. This function
 * stands in front of the library's own and answers with less, as long as somebody asked for less
 * and his time has not run out. It never answers with more: buffers are sized by the value at boot.
 * What is asked for carries its own end, so that nobody has to be alive to take it back.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct llama_context;
typedef uint32_t (*batch_size)(const struct llama_context *);

uint32_t llama_n_batch(const struct llama_context *context);

static _Atomic uint32_t wanted_tokens; /* 0: the value at boot */
static _Atomic int64_t wanted_until_ns;
static _Atomic uint32_t boot_tokens;
static _Atomic uint32_t used_tokens;
static _Atomic uint64_t asked;
static _Atomic int64_t asked_at_ns;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The library's own. A Python extension is not in the global namespace: look into the caller's. */
static batch_size original(void *caller) {
    static _Atomic(batch_size) known;
    batch_size found = atomic_load_explicit(&known, memory_order_acquire);
    if (found == NULL) {
        Dl_info from;
        found = (batch_size)dlsym(RTLD_NEXT, "llama_n_batch");
        if (found == NULL && dladdr(caller, &from) && from.dli_fname != NULL) {
            void *library = dlopen(from.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
            found = library == NULL ? NULL : (batch_size)dlsym(library, "llama_n_batch");
        }
        if (found == NULL || found == llama_n_batch) {
            fputs("servoscope: live chunk: llama_n_batch is not where it is called from\n", stderr);
            abort();
        }
        atomic_store_explicit(&known, found, memory_order_release);
    }
    return found;
}

uint32_t llama_n_batch(const struct llama_context *context) {
    uint32_t boot = original(__builtin_return_address(0))(context);
    uint32_t wanted = atomic_load(&wanted_tokens);
    int64_t now = now_ns();
    uint32_t used = boot;
    if (wanted != 0 && wanted < boot && now < atomic_load(&wanted_until_ns))
        used = wanted;
    atomic_store(&boot_tokens, boot);
    atomic_store(&used_tokens, used);
    atomic_store(&asked_at_ns, now);
    atomic_fetch_add(&asked, 1);
    return used;
}

void servoscope_chunk_set(uint32_t tokens, int64_t until_ns) {
    atomic_store(&wanted_tokens, 0);
    atomic_store(&wanted_until_ns, until_ns);
    atomic_store(&wanted_tokens, tokens);
}

uint32_t servoscope_chunk_boot(void) { return atomic_load(&boot_tokens); }
uint32_t servoscope_chunk_used(void) { return atomic_load(&used_tokens); }
uint64_t servoscope_chunk_asked(void) { return atomic_load(&asked); }
int64_t servoscope_chunk_asked_at_ns(void) { return atomic_load(&asked_at_ns); }
