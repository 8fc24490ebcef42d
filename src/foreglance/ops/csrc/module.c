/* The Python module: chooses the instruction set, calls one kernel or a list of them, and keeps the threads.

   Addresses and sizes come from Python as integers and are believed; ops/native.py is the only caller. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fg.h"

#ifdef FG_DOTPROD
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

#ifndef _WIN32
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#endif

static const Isa *isa = &isa_portable;

#ifdef FG_DOTPROD
static int has_dotprod(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, 0, 0) && found;
#else
    return 0;
#endif
}
#endif

static const Isa *const *usable(void) {
    static const Isa *found[5];
    int count = 0;
#ifdef FG_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        found[count++] = &isa_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        unsigned eax = 7, ebx, ecx = 1, edx;
        __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
        if (eax & 1 << 4) found[count++] = &isa_avxvnni;
        found[count++] = &isa_avx2;
    }
#endif
#ifdef FG_DOTPROD
    if (has_dotprod()) found[count++] = &isa_neon;
#endif
    found[count++] = &isa_portable;
    found[count] = 0;
    return found;
}

typedef struct {
    int64_t kernel;
    Arg args[MAX_ARGS];
} Line;

#ifndef _WIN32

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- threads: workers run a list along with the caller, line by line, and stay awake for a while after it. Who is
   there takes the next share of the open line; the last one to finish a share opens the next line. So a thread that
   does not get its turn on a processor is not waited for, unless it was in the midst of a share. ---- */

#define MAX_THREADS 64
#define SPINS_AWAKE 200000 /* about 0.2 ms, longer than Python needs between two steps of a small model */
#define SPINS_IN_LINE 4000

static int threads = 1;
static int started = 1; /* threads that exist, the caller's among them */
static const Line *lines;
static int64_t num_lines;
static atomic_int finished, sleepers;
static atomic_ullong state; /* job << 32 | open line << 8 | next share of it to take */
#define TAKEN 0xffull       /* no share is left to take */
#define OVER 0xffffffull    /* in place of a line: the job is done */
#define JOB(state) ((uint32_t)((state) >> 32))
#define LINE(state) ((uint32_t)((state) >> 8) & OVER)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static inline void rest(int *spins, int limit) {
#ifdef FG_X86
    __builtin_ia32_pause();
#endif
    if (++*spins >= limit) {
        sched_yield();
        *spins = 0;
    }
}

/* Shares of the lines of a job, until it is done. What a job consists of is read after a share of it was taken: until
   that is finished it stays. */
static void run_shares(uint32_t job) {
    int spins = 0;
    for (;;) {
        unsigned long long now_at = atomic_load_explicit(&state, memory_order_acquire);
        if (JOB(now_at) != job || LINE(now_at) == OVER) return;
        int part = (int)(now_at & TAKEN), parts = threads;
        if (part == (int)TAKEN) {
            rest(&spins, SPINS_IN_LINE);
            continue;
        }
        if (!atomic_compare_exchange_weak(&state, &now_at, part + 1 < parts ? now_at + 1 : now_at | TAKEN)) continue;
        int64_t line = (int64_t)LINE(now_at);
        isa->kernels[lines[line].kernel](lines[line].args, part, parts);
        spins = 0;
        if (atomic_fetch_add(&finished, 1) + 1 < parts) continue;
        unsigned long long next = line + 1 < num_lines ? (unsigned long long)(line + 1) << 8 : OVER << 8 | TAKEN;
        atomic_store(&finished, 0);
        atomic_store(&state, (unsigned long long)job << 32 | next);
    }
}

static void *work(void *number) {
    int own = (int)(intptr_t)number;
    uint32_t seen = 0, current;
    for (;;) {
        int spins = 0;
        while ((current = JOB(atomic_load_explicit(&state, memory_order_acquire))) == seen && spins < SPINS_AWAKE) {
#ifdef FG_X86
            __builtin_ia32_pause();
#endif
            spins++;
        }
        if (current == seen) {
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&sleepers, 1);
            while ((current = JOB(atomic_load(&state))) == seen) pthread_cond_wait(&wake, &lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&lock);
        }
        seen = current;
        if (own < threads) run_shares(current);
    }
    return 0;
}

static void run_lines(const Line *list, int64_t count) {
    if (threads == 1) {
        for (int64_t i = 0; i < count; i++) isa->kernels[list[i].kernel](list[i].args, 0, 1);
        return;
    }
    if (!count) return;
    uint32_t job = JOB(atomic_load(&state)) + 1;
    lines = list;
    num_lines = count;
    atomic_store(&state, (unsigned long long)job << 32);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    run_shares(job);
}

static int start_threads(int wanted) {
    while (started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, work, (void *)(intptr_t)started)) return -1;
        pthread_detach(thread);
        started++;
    }
    threads = wanted;
    return 0;
}

#else

#define MAX_THREADS 1
static int threads = 1;
static int64_t now(void) { return 0; }
static void run_lines(const Line *list, int64_t count) {
    for (int64_t i = 0; i < count; i++) isa->kernels[list[i].kernel](list[i].args, 0, 1);
}
static int start_threads(int wanted) { return wanted == 1 ? 0 : -1; }

#endif

/* ---- Python ---- */

static int cell(PyObject *value, Arg *out) {
    if (PyFloat_Check(value)) {
        out->f = PyFloat_AsDouble(value);
        return 0;
    }
    out->i = PyLong_AsLongLong(value);
    return out->i == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Line line;
    (void)self;
    if (count < 1 || count > MAX_ARGS + 1) {
        PyErr_SetString(PyExc_TypeError, "call(kernel, at most 24 arguments)");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (cell(args[i], i ? &line.args[i - 1] : (Arg *)&line.kernel)) return 0;
    if (line.kernel < 0 || line.kernel >= NUM_KERNELS) {
        PyErr_SetString(PyExc_ValueError, "no such kernel");
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS run_lines(&line, 1);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arg address, number, times;
    (void)self;
    if (count != 3 || cell(args[0], &address) || cell(args[1], &number) || cell(args[2], &times)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "run(address of lines, number of lines, times)");
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS for (int64_t i = 0; i < times.i; i++) run_lines(address.p, number.i);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *py_time(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Arg address, number, spent;
    (void)self;
    if (count != 3 || cell(args[0], &address) || cell(args[1], &number) || cell(args[2], &spent)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "time(address of lines, number, address of times)");
        return 0;
    }
    const Line *list = address.p;
    for (int64_t i = 0; i < number.i; i++) {
        int64_t began = now();
        run_lines(list + i, 1);
        ((int64_t *)spent.p)[i] += now() - began;
    }
    Py_RETURN_NONE;
}

static PyObject *py_threads(PyObject *self, PyObject *wanted) {
    long number = PyLong_AsLong(wanted);
    (void)self;
    if (number == -1 && PyErr_Occurred()) return 0;
    if (number < 1) number = threads;
    if (number > MAX_THREADS) number = MAX_THREADS;
    if (number != threads && start_threads((int)number)) {
        PyErr_SetString(PyExc_OSError, "no more threads can be started");
        return 0;
    }
    return PyLong_FromLong(threads);
}

static PyObject *py_use(PyObject *self, PyObject *name) {
    (void)self;
    for (const Isa *const *one = usable(); *one; one++) {
        PyObject *own = PyUnicode_FromString((*one)->name);
        int same = own && PyUnicode_Compare(own, name) == 0;
        Py_XDECREF(own);
        if (same) {
            isa = *one;
            Py_RETURN_NONE;
        }
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this processor has no such instruction set");
    return 0;
}

static PyObject *py_usable(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    PyObject *list = PyList_New(0);
    for (const Isa *const *one = usable(); list && *one; one++) {
        PyObject *name = PyUnicode_FromString((*one)->name);
        if (!name || PyList_Append(list, name)) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *py_using(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    return PyUnicode_FromString(isa->name);
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))py_call, METH_FASTCALL, "call(kernel, *arguments): one kernel."},
    {"run", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL, "run(address, count, times): a list of kernels."},
    {"time", (PyCFunction)(void (*)(void))py_time, METH_FASTCALL,
     "time(address, count, times): a list of kernels; adds nanoseconds per line to int64 times."},
    {"threads", py_threads, METH_O, "threads(wanted): how many threads run a kernel from now on; 0 asks only."},
    {"use", py_use, METH_O, "use(name): the instruction set from now on."},
    {"usable", py_usable, METH_NOARGS, "usable(): instruction sets of this processor, the best first."},
    {"using", py_using, METH_NOARGS, "using(): the instruction set in use."},
    {0, 0, 0, 0},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels of foreglance; see ops/native.py.", -1,
                                    methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *self = PyModule_Create(&module);
    if (!self) return 0;
    isa = usable()[0];
#ifdef FG_SOURCES
    PyModule_AddStringConstant(self, "sources", FG_SOURCES); /* ops/sources.py */
#endif
#define X(number, name) PyModule_AddIntConstant(self, #name, number);
    KERNELS(X)
#undef X
    return self;
}
