/* libweightrefit.so: the executor of weightrefit in the process of a trainer's or an engine's rank.
 *
 * The executor obeys the agent of the rank's pod over the agent socket (docs/agent-socket.md): it forms communicators of
 * NCCL and moves bytes with them, on the primary context of the rank's GPU, in streams of the lowest priority, with few
 * thread blocks. It has threads of its own, and leaves the calling thread's CUDA context as it is.
 *
 * Every function may be called from any thread, and none throws, exits or writes to standard output. Start it after the
 * last fork: a child has none of its threads.
 */
#ifndef WEIGHTREFIT_H
#define WEIGHTREFIT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Number of this interface. It grows when something changes that is here; a caller that was made for another number than
 * weightrefit_interface() answers must not go on. */
#define WEIGHTREFIT_INTERFACE 1

/* An executor. */
typedef struct weightrefit_executor weightrefit_executor;

/* What an executor is started with. Texts are UTF-8, end with a 0, and are not needed after the call. */
typedef struct {
    /* sizeof(weightrefit_settings). */
    uint64_t size;
    /* Path of the agent's socket. */
    const char *socket;
    /* The rank: "training/RANK" or "inference/POOL/REPLICA/RANK". */
    const char *seat;
    /* libcuda and libnccl to use in place of those that the loader finds; may be null. NCCL must be of one version on all
     * ranks. */
    const char *cuda_library;
    const char *nccl_library;
    /* Bytes of device memory for packed windows of one replica; 0 is 2 GiB. */
    uint64_t window_bytes;
    /* Number of the rank's GPU among those that this process sees, as CUDA counts them. */
    uint32_t device;
    /* Milliseconds for which the agent may be away. */
    uint32_t patience_ms;
} weightrefit_settings;

/* WEIGHTREFIT_INTERFACE of the library. */
uint32_t weightrefit_interface(void);

/* Version of the library, for people; lives as long as the library. */
const char *weightrefit_version(void);

/* Starts an executor, and waits until the agent has taken it. 0 and an executor in `*out`; else 1 and null. */
uint32_t weightrefit_start(const weightrefit_settings *settings, weightrefit_executor **out);

/* 0 while it works. 1 once it does not any more: the agent refuses it, or a communicator could not be ended in time
 * (code AgentWedged: kernels may run for ever on the GPU, and the process must end). */
uint32_t weightrefit_check(const weightrefit_executor *executor);

/* Stops it: what it moves is aborted. Waits for the end, frees the executor whatever is returned, and returns what
 * weightrefit_check would. Null is stopped already. */
uint32_t weightrefit_stop(weightrefit_executor *executor);

/* Why the last call of this thread returned 1: a stable code, as `weightrefit explain` knows it, and a sentence. Empty
 * after a call that returned 0. Valid until the thread's next call of the library. */
const char *weightrefit_error_code(void);
const char *weightrefit_error_text(void);

#ifdef __cplusplus
}
#endif

#endif
