// Preact with htm: templates in place of JSX, so that nothing has to be built.
import { h, render, Fragment } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Fragment, h, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };
