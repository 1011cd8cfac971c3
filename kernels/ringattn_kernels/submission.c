/* Queues a list of CUDA driver calls; `submission.py` says how it comes about. The list is made once. Before each run, the numbers that differ
   from run to run (addresses, counts) are written into the calls' arguments. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <stdint.h>
#include <string.h>

enum { LAUNCH, MARK, AFTER, OPERATE, COPY };       /* kinds of steps */
enum { WORD, HALF_WORD, TENSOR_MAP };              /* what a patch writes: 64 bits, 32 bits, the address of a descriptor */

/* LAUNCH: function, three sizes of the grid, threads, bytes of shared memory, first parameter, number of parameters
   MARK, AFTER: event
   OPERATE, COPY: place of the arguments, their number */
typedef struct {
  int64_t kind, stream, values[8];
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
  void *parameters[values[7] + 1];
  for (int64_t i = 0; i < values[7]; i++) parameters[i] = program->arguments + program->parameters[values[6] + i];
  CUlaunchConfig config;
  memset(&config, 0, sizeof(config));
  config.gridDimX = (unsigned int)values[1];
  config.gridDimY = (unsigned int)values[2];
  config.gridDimZ = (unsigned int)values[3];
  config.blockDimX = (unsigned int)values[4];
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = (unsigned int)values[5];
  config.hStream = (CUstream)step->stream;
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

/* submit(address of the program, list of numbers): None, or the driver's error as a pair (number of the step, error) */
static PyObject *submit(PyObject *self, PyObject *args) {
  unsigned long long address;
  PyObject *list;
  if (!PyArg_ParseTuple(args, "KO!", &address, &PyList_Type, &list)) return NULL;
  const Program *program = (const Program *)(uintptr_t)address;
  Py_ssize_t count = PyList_GET_SIZE(list);
  int64_t numbers[count + 1];
  for (Py_ssize_t i = 0; i < count; i++) {
    numbers[i] = (int64_t)PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(list, i));
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

static PyMethodDef methods[] = {{"submit", submit, METH_VARARGS, "Queue the calls of a program."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ringattn_submission", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ringattn_submission(void) { return PyModule_Create(&definition); }
