/* What the parts in C that read and write arrays share: this file comes before each of them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* of a table of tiles, without the places */
enum { TILE_COLUMNS = 6 };

/* other threads go on during work on so many numbers or more */
#define MANY 16384
#define LARGEST ((int64_t)INT32_MAX)

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
/* a / b, rounded up; neither is negative */
static inline int64_t parts(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static PyThreadState *release(int64_t numbers) { return numbers < MANY ? NULL : PyEval_SaveThread(); }

static void resume(PyThreadState *thread) {
  if (thread != NULL) PyEval_RestoreThread(thread);
}

static int in_range(const char *name, int64_t value, int64_t lowest) {
  if (value >= lowest && value <= LARGEST) return 1;
  PyErr_Format(PyExc_ValueError, "%s is %lld, but must be within %lld and 2**31 - 1", name, (long long)value, (long long)lowest);
  return 0;
}

/* A table of integers of so many bytes, with at least so many columns; of int32 its rows follow one another. */
static int open_table(PyObject *object, Py_buffer *buffer, Py_ssize_t itemsize, Py_ssize_t columns) {
  int flags = itemsize == 4 ? PyBUF_C_CONTIGUOUS | PyBUF_FORMAT : PyBUF_RECORDS_RO;
  if (PyObject_GetBuffer(object, buffer, flags)) return 0;
  const char *format = buffer->format;
  int integers = format != NULL && format[0] != 0 && format[1] == 0 && strchr("ilq", format[0]) != NULL;
  if (buffer->ndim == 2 && integers && buffer->itemsize == itemsize && buffer->shape[1] >= columns && buffer->shape[0] < LARGEST) return 1;
  PyErr_Format(PyExc_ValueError, "this is no table of integers of %zd bytes in %zd columns or more", itemsize, columns);
  return 0;
}

static int64_t number_at(const Py_buffer *table, Py_ssize_t row, Py_ssize_t column) {
  int64_t value;
  memcpy(&value, (const char *)table->buf + row * table->strides[0] + column * table->strides[1], sizeof(value));
  return value;
}

/* The numbers from 0 on in `order`, by falling keys, those of equal keys as they come. Keys are not negative; `spare` is as large as `order`. */
static void sort_falling(const int64_t *keys, int64_t count, int64_t *order, int64_t *spare) {
  int64_t highest = 0, *from = order, *to = spare;
  int sorted = 1;
  for (int64_t i = 0; i < count; i++) {
    order[i] = i;
    highest = most(highest, keys[i]);
    sorted &= i == 0 || keys[i - 1] >= keys[i];
  }
  if (sorted) return;
  /* digit by digit from the lowest */
  for (int shift = 0; shift < 63 && highest >> shift; shift += 8) {
    int64_t place[256] = {0}, before = 0;
    for (int64_t i = 0; i < count; i++) place[(keys[i] >> shift) & 255]++;
    for (int digit = 255; digit >= 0; digit--) {
      int64_t there = place[digit];
      place[digit] = before;
      before += there;
    }
    for (int64_t i = 0; i < count; i++) to[place[(keys[from[i]] >> shift) & 255]++] = from[i];
    int64_t *sorted_so_far = to;
    to = from;
    from = sorted_so_far;
  }
  if (from != order) memcpy(order, from, count * sizeof(int64_t));
}
