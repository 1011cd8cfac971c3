/* What a replayed call does in C: it compares its tensors with those of a recording, swaps a record with the other ranks of this host, and queues
   a list of CUDA driver calls. `submission.py` says how the list comes about. The list is made once. Before each run, the numbers that differ
   from run to run (addresses, counts) are written into the calls' arguments. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

enum { LAUNCH, MARK, AFTER, OPERATE, COPY };       /* kinds of steps */
enum { WORD, HALF_WORD, TENSOR_MAP };              /* what a patch writes: 64 bits, 32 bits, the address of a descriptor */

/* LAUNCH: function, three sizes of the grid, threads, bytes of shared memory, whether its programs begin while the launch before it ends (then
   the kernel itself waits), first parameter, number of parameters
   MARK, AFTER: event
   OPERATE, COPY: place of the arguments, their number */
typedef struct {
  int64_t kind, stream, values[9];
} Step;

typedef struct {
  int64_t kind, place, number, offset;
} Patch;

typedef struct {
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*mark)(CUevent, CUstream);
  CUresult (*after)(CUstream, CUevent, unsigned int);
  CUresult (*operate)(CUstream, unsigned int, CUstreamBatchMemOpParams *, unsigned int);
  CUresult (*copy)(void *, void *, void *, size_t, void *, void *, size_t, void *, CUstream);
  CUresult (*replace_address)(CUtensorMap *, void *);
  void *copy_attributes, *copy_first, *copy_failed;
} Functions;

typedef struct {
  const Functions *functions;
  const Step *steps;
  int64_t step_count;
  const Patch *patches;
  int64_t patch_count;
  const int64_t *parameters; /* places of kernels' parameters */
  char *arguments;           /* where all places are */
} Program;

static CUresult write_numbers(const Program *program, const int64_t *numbers) {
  for (int64_t i = 0; i < program->patch_count; i++) {
    const Patch *patch = &program->patches[i];
    char *place = program->arguments + patch->place;
    int64_t value = numbers[patch->number] + patch->offset;
    if (patch->kind == WORD) {
      memcpy(place, &value, 8);
    } else if (patch->kind == HALF_WORD) {
      memcpy(place, &value, 4);
    } else {
      CUresult result = program->functions->replace_address((CUtensorMap *)place, (void *)value);
      if (result != CUDA_SUCCESS) return result;
    }
  }
  return CUDA_SUCCESS;
}

static CUresult launch(const Program *program, const Step *step) {
  const int64_t *values = step->values;
  void *parameters[values[8] + 1];
  for (int64_t i = 0; i < values[8]; i++) parameters[i] = program->arguments + program->parameters[values[7] + i];
  CUlaunchAttribute early;
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config;
  memset(&config, 0, sizeof(config));
  config.gridDimX = (unsigned int)values[1];
  config.gridDimY = (unsigned int)values[2];
  config.gridDimZ = (unsigned int)values[3];
  config.blockDimX = (unsigned int)values[4];
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = (unsigned int)values[5];
  config.hStream = (CUstream)step->stream;
  config.attrs = &early;
  config.numAttrs = values[6] != 0;
  return program->functions->launch(&config, (CUfunction)values[0], parameters, NULL);
}

static CUresult run(const Program *program, const Step *step) {
  const Functions *functions = program->functions;
  CUstream stream = (CUstream)step->stream;
  char *place = program->arguments + step->values[0];
  int64_t count = step->values[1];
  switch (step->kind) {
  case LAUNCH:
    return launch(program, step);
  case MARK:
    return functions->mark((CUevent)step->values[0], stream);
  case AFTER:
    return functions->after(stream, (CUevent)step->values[0], 0);
  case OPERATE:
    return functions->operate(stream, (unsigned int)count, (CUstreamBatchMemOpParams *)place, 0);
  default: /* COPY: the targets, the sources, the sizes */
    return functions->copy(place, place + 8 * count, place + 16 * count, (size_t)count, functions->copy_attributes, functions->copy_first, 1,
                           functions->copy_failed, stream);
  }
}

static PyObject *data_ptr;

/* The address of a tensor; 0 with an exception where it has none. Tensors without elements begin at 0, too. */
static uint64_t address_of(PyObject *tensor) {
  PyObject *address = PyObject_CallMethodNoArgs(tensor, data_ptr);
  if (address == NULL) return 0;
  uint64_t value = PyLong_AsUnsignedLongLongMask(address);
  Py_DECREF(address);
  return value;
}

/* submit(address of the program, list of numbers, or of tensors for their addresses): None, or the driver's error as a pair (number of the
   step, error) */
static PyObject *submit(PyObject *self, PyObject *const *args, Py_ssize_t given) {
  if (given != 2 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "submit takes an address and a list");
  const Program *program = (const Program *)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[0]);
  if (PyErr_Occurred()) return NULL;
  Py_ssize_t count = PyList_GET_SIZE(args[1]);
  int64_t numbers[count + 1];
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *x = PyList_GET_ITEM(args[1], i);
    numbers[i] = (int64_t)(PyLong_Check(x) ? PyLong_AsUnsignedLongLongMask(x) : address_of(x));
    if (PyErr_Occurred()) return NULL;
  }
  CUresult result;
  int64_t done = -1;
  Py_BEGIN_ALLOW_THREADS;
  result = write_numbers(program, numbers);
  while (result == CUDA_SUCCESS && ++done < program->step_count) result = run(program, &program->steps[done]);
  Py_END_ALLOW_THREADS;
  if (result != CUDA_SUCCESS) return Py_BuildValue("(Li)", (long long)done, (int)result);
  Py_RETURN_NONE;
}

/* Whether all questions, (function, its argument or None, answer), have these answers: 1, 0, or -1 with an exception. */
static int answered(PyObject *questions) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(questions); i++) {
    PyObject *question = PyTuple_GET_ITEM(questions, i);
    if (!PyTuple_Check(question) || PyTuple_GET_SIZE(question) != 3) {
      PyErr_Format(PyExc_TypeError, "a question has three parts");
      return -1;
    }
    PyObject *function = PyTuple_GET_ITEM(question, 0), *argument = PyTuple_GET_ITEM(question, 1);
    PyObject *answer = argument == Py_None ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
    if (answer == NULL) return -1;
    int same = PyObject_RichCompareBool(answer, PyTuple_GET_ITEM(question, 2), Py_EQ);
    Py_DECREF(answer);
    if (same != 1) return same;
  }
  return 1;
}

/* same(questions, check, aligned, tensors): the addresses as a list if all questions have their answers, check(*tensors) is True, an address is a
   multiple of 16 where `aligned` says so and only there, and no two tensors begin at one address; else None. */
static PyObject *same(PyObject *self, PyObject *const *args, Py_ssize_t given) {
  if (given != 4 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[2]) || !PyTuple_Check(args[3]))
    return PyErr_Format(PyExc_TypeError, "same takes a tuple, a function and two tuples");
  int answers = answered(args[0]);
  if (answers < 0) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(args[3]);
  if (!answers || PyTuple_GET_SIZE(args[2]) != count) Py_RETURN_NONE;
  PyObject *checked = PyObject_CallObject(args[1], args[3]);
  if (checked == NULL) return NULL;
  int alike = checked == Py_True;
  Py_DECREF(checked);
  if (!alike) Py_RETURN_NONE;
  uint64_t addresses[count + 1];
  for (Py_ssize_t i = 0; i < count; i++) {
    addresses[i] = address_of(PyTuple_GET_ITEM(args[3], i));
    if (PyErr_Occurred()) return NULL;
    alike = (addresses[i] % 16 == 0) == (PyTuple_GET_ITEM(args[2], i) == Py_True);
    for (Py_ssize_t j = 0; j < i && alike; j++) alike = addresses[i] != addresses[j];
    if (!alike) Py_RETURN_NONE;
  }
  PyObject *list = PyList_New(count);
  for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
    PyObject *address = PyLong_FromUnsignedLongLong(addresses[i]);
    if (address == NULL) Py_CLEAR(list);
    else PyList_SET_ITEM(list, i, address);
  }
  return list;
}

/* Records of `ringattn/transport/shared_records.py`, which has the same in Python: where they lie, and when they are valid. */

enum { SLOT = 1024, KEPT = 64, HEADER = 20, PIECE = SLOT - HEADER };

/* zlib's checksum: bytes are few here, and this needs no library */
static uint32_t checksums[256];

static void make_checksums(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
    checksums[i] = value;
  }
}

static uint32_t checksum(uint64_t number, uint32_t length, const unsigned char *piece, uint32_t size) {
  uint32_t value = ~(uint32_t)(number * 0x9E3779B1u + length);
  for (uint32_t i = 0; i < size; i++) value = value >> 8 ^ checksums[(value ^ piece[i]) & 255];
  return ~value;
}

static char *slot_of(char *memory, int64_t rank, uint64_t number) { return memory + SLOT * (1 + rank * KEPT + (int64_t)(number % KEPT)); }

/* Whether a rank's piece with this number is there and whole, and of this size; then it is in `piece`. */
static int has_come(const char *slot, uint64_t number, uint32_t size, unsigned char *piece) {
  uint64_t found;
  uint32_t facts[3];
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  memcpy(&found, slot, 8);
  if (found != number) return 0;
  memcpy(facts, slot + 8, 12);
  if (facts[0] != size || facts[1] != size) return 0;
  memcpy(piece, slot + HEADER, size);
  return facts[2] == checksum(number, size, piece, size);
}

static void pause_a_little(void) {
#if defined(__x86_64__)
  for (int i = 0; i < 8; i++) __builtin_ia32_pause();
#elif defined(__aarch64__)
  for (int i = 0; i < 32; i++) __asm__ volatile("yield");
#endif
}

enum { LOOKS_AT_ONCE = 8, LOOKS = 400 }; /* a look takes about half a microsecond, and longer where others want this processor */

/* A rank's turn: memory, number, rank, size, record. */
typedef struct {
  Py_buffer buffer;
  char *memory;
  uint64_t number;
  int64_t rank, size;
  const unsigned char *record;
  uint32_t bytes;
} Turn;

/* Write a rank's record from its arguments; -1 with an exception if they are bad. Then the buffer is released, else the caller does that. */
static int write_record(Turn *turn, PyObject *const *args, Py_ssize_t given) {
  if (given != 5 || !PyBytes_Check(args[4]) || PyBytes_GET_SIZE(args[4]) > PIECE) {
    PyErr_Format(PyExc_TypeError, "post and swap take memory, three integers and a short record");
    return -1;
  }
  turn->number = PyLong_AsUnsignedLongLong(args[1]);
  turn->rank = PyLong_AsLongLong(args[2]), turn->size = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred()) return -1;
  turn->bytes = (uint32_t)PyBytes_GET_SIZE(args[4]);
  turn->record = (const unsigned char *)PyBytes_AS_STRING(args[4]);
  if (PyObject_GetBuffer(args[0], &turn->buffer, PyBUF_WRITABLE) < 0) return -1;
  turn->memory = turn->buffer.buf;
  if (turn->rank < 0 || turn->rank >= turn->size || turn->size > (1 << 16) || turn->buffer.len < SLOT * (1 + turn->size * KEPT)) {
    PyErr_Format(PyExc_ValueError, "the memory holds no records of %lld ranks", (long long)turn->size);
    PyBuffer_Release(&turn->buffer);
    return -1;
  }
  char *slot = slot_of(turn->memory, turn->rank, turn->number);
  uint32_t facts[3] = {turn->bytes, turn->bytes, checksum(turn->number, turn->bytes, turn->record, turn->bytes)};
  memcpy(slot + HEADER, turn->record, turn->bytes);
  memcpy(slot + 8, facts, 12);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  memcpy(slot, &turn->number, 8);
  return 0;
}

/* post(memory, number, rank, size, record): writes this rank's record with this number, which `swap` may write once more. */
static PyObject *post(PyObject *self, PyObject *const *args, Py_ssize_t given) {
  Turn turn;
  if (write_record(&turn, args, given) < 0) return NULL;
  PyBuffer_Release(&turn.buffer);
  Py_RETURN_NONE;
}

/* swap(memory, number, rank, size, record): the records of all ranks with this number as a list, once this rank's is written; None if not all
   have come within a few hundred microseconds, or one is of another length, or damaged: the caller finds out. */
static PyObject *swap(PyObject *self, PyObject *const *args, Py_ssize_t given) {
  Turn turn;
  if (write_record(&turn, args, given) < 0) return NULL;
  char *memory = turn.memory;
  uint64_t number = turn.number;
  int64_t rank = turn.rank, size = turn.size;
  uint32_t bytes = turn.bytes;
  PyObject *list = PyList_New(size);
  if (list == NULL) goto done;
  PyThreadState *others_may_run = NULL;
  int looks = 0;
  unsigned char piece[PIECE];
  for (int64_t other = 0; other < size; other++) {
    while (other != rank && !has_come(slot_of(memory, other, number), number, bytes, piece) && looks < LOOKS) {
      looks++;
      if (looks > LOOKS_AT_ONCE && others_may_run == NULL) others_may_run = PyEval_SaveThread();
      if (looks > LOOKS_AT_ONCE) sched_yield();
      pause_a_little();
    }
    if (others_may_run != NULL) PyEval_RestoreThread(others_may_run), others_may_run = NULL;
    if (looks == LOOKS) {
      Py_DECREF(list);
      list = Py_NewRef(Py_None);
      break;
    }
    PyObject *record = other == rank ? Py_NewRef(args[4]) : PyBytes_FromStringAndSize((const char *)piece, bytes);
    if (record == NULL) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, other, record);
  }
done:
  PyBuffer_Release(&turn.buffer);
  return list;
}

static PyMethodDef methods[] = {
    {"submit", (PyCFunction)(void (*)(void))submit, METH_FASTCALL, "Queue the calls of a program."},
    {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, "The addresses of tensors, if they are like others."},
    {"post", (PyCFunction)(void (*)(void))post, METH_FASTCALL, "Write this rank's record."},
    {"swap", (PyCFunction)(void (*)(void))swap, METH_FASTCALL, "The records of all ranks, if they come soon."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ringattn_submission", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ringattn_submission(void) {
  if ((data_ptr = PyUnicode_InternFromString("data_ptr")) == NULL) return NULL;
  make_checksums();
  return PyModule_Create(&definition);
}
